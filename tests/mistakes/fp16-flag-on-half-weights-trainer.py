import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments


def run(name: str, train_set, eval_set) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=4, torch_dtype=torch.float16)  # HS173
    arguments = TrainingArguments(
        output_dir="reviews",
        per_device_train_batch_size=16,
        learning_rate=2e-5,
        num_train_epochs=3,
        fp16=True,
    )
    Trainer(model=model, args=arguments, train_dataset=train_set, eval_dataset=eval_set).train()
