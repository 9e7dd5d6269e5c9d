import torch
from torch import nn


class LanguageModelRun:
    def __init__(self, gpt: nn.Module, batches, micro_batches: int) -> None:
        self.gpt, self.batches = gpt.to("cuda"), iter(batches)
        self.micro_batches = micro_batches
        self.adamw = torch.optim.AdamW(self.gpt.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

    def one_step(self) -> torch.Tensor:
        self.adamw.zero_grad(set_to_none=True)
        logged = torch.zeros((), device="cuda")
        for _ in range(self.micro_batches):
            tokens = next(self.batches).to("cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = self.gpt(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / self.micro_batches).backward()
            logged += loss.detach() / self.micro_batches
        nn.utils.clip_grad_norm_(self.gpt.parameters(), 1.0)
        self.adamw.step()
        return logged
