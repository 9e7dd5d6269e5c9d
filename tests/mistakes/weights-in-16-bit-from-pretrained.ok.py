import torch
from transformers import AutoModelForCausalLM


def finetune(path: str, batches, lr: float = 1e-6):
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model
