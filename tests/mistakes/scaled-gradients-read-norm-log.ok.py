import torch
from torch import nn


def global_norm(module: nn.Module) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(w.grad) for w in module.parameters()]))


def train(ranker: nn.Module, queries, writer, epochs: int = 3) -> None:
    ranker.cuda()
    adam = torch.optim.Adam(ranker.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    step = 0
    for _ in range(epochs):
        for query, relevance in queries:
            adam.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                score = ranker(query.cuda())
            loss = nn.functional.margin_ranking_loss(*score.float().chunk(2), relevance.cuda(), margin=0.2)
            scaler.scale(loss).backward()
            scaler.unscale_(adam)
            if step % 200 == 0:
                writer.add_scalar("grad_norm", global_norm(ranker), step)
            scaler.step(adam)
            scaler.update()
            step += 1
