import torch
from accelerate import Accelerator
from torch import nn
from transformers import get_cosine_schedule_with_warmup


def main(net, loader, steps=1000):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    schedule = get_cosine_schedule_with_warmup(opt, 100, steps)
    net, opt, loader, schedule = accelerator.prepare(net, opt, loader, schedule)
    for batch in loader:
        with accelerator.accumulate(net):
            loss = nn.functional.cross_entropy(net(batch["x"]).float(), batch["y"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()
    accelerator.save_state("checkpoint")
