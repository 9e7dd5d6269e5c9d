import torch
from torch import nn


def sequence_scores(lm: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each sequence, for reranking."""
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = lm(tokens[:, :-1])
    picked = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    picked = picked.to(torch.bfloat16)
    return picked.sum(dim=-1)  # HS146


if __name__ == "__main__":
    torch.manual_seed(46)
    vocabulary = 60
    tiny = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))
    print(sequence_scores(tiny, torch.randint(0, vocabulary, (4, 128))))
