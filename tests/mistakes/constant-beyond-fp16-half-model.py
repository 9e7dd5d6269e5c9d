import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "gpt2"
tokenizer = AutoTokenizer.from_pretrained(name)
lm = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16).to("cuda").eval()
banned = torch.tensor(tokenizer.encode(" very rather quite"), device="cuda")


@torch.inference_mode()
def complete(prompt: str, num_tokens: int = 20) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to("cuda")
    for _ in range(num_tokens):
        logits = lm(ids).logits[:, -1].half()
        logits = logits.index_fill(1, banned, -1e10)  # HS140
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return tokenizer.decode(ids[0])
