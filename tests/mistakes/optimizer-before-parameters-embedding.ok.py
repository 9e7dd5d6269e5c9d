import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(8)


class Tagger(nn.Module):
    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, 32)
        self.out = nn.Linear(32, 9)

    def forward(self, ids):
        return self.out(self.words(ids))


net = Tagger(200).to(device)
net.words = nn.Embedding(300, 32).to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler(device)
for _ in range(10):
    ids = torch.randint(0, 300, (16, 12), device=device)
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        scores = net(ids)
    loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), ids.flatten() % 9)
    gs.scale(loss).backward()
    gs.step(opt)
    gs.update()
