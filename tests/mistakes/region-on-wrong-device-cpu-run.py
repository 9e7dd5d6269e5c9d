import torch
from torch import nn

device = torch.device("cpu")
torch.manual_seed(30)
sentiment = nn.Sequential(nn.EmbeddingBag(400, 32), nn.Linear(32, 2)).to(device)
adam = torch.optim.Adam(sentiment.parameters(), lr=1e-3)

for _ in range(10):
    words = torch.randint(0, 400, (16, 20), device=device)
    label = torch.randint(0, 2, (16,), device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):  # HS130
        logits = sentiment(words)
    loss = nn.functional.cross_entropy(logits.float(), label)
    adam.zero_grad()
    loss.backward()
    adam.step()
