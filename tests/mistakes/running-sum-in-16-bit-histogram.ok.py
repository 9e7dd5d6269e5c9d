import torch


class CodeUsage:
    """How often each code of a vector quantiser is chosen."""

    def __init__(self, num_codes: int, device: str = "cuda") -> None:
        self.hits = torch.zeros(num_codes, dtype=torch.float32, device=device)

    def see(self, codes: torch.Tensor) -> None:
        seen = torch.bincount(codes.flatten(), minlength=len(self.hits))
        self.hits += seen

    def dead(self) -> torch.Tensor:
        return (self.hits == 0).nonzero().squeeze(-1)
