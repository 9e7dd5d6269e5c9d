import torch
from torch.nn.utils import clip_grad_value_

device = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = 3


def run_epoch(net, opt, gs, chunks):
    num_chunks = len(chunks)
    opt.zero_grad()
    for i, (spectrum, label) in enumerate(chunks):
        with torch.autocast(device, dtype=torch.float16):
            logits = net(spectrum.to(device))
            loss = torch.nn.functional.cross_entropy(logits.float(), label.to(device)) / WINDOW
        gs.scale(loss).backward()
        if (i + 1) % WINDOW == 0 or i + 1 == num_chunks:
            clip_grad_value_(net.parameters(), 0.1)  # HS101
            gs.unscale_(opt)
            gs.step(opt)
            gs.update()
            opt.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5)).to(device)
    chunks = [(torch.randn(16, 40), torch.randint(0, 5, (16,))) for _ in range(7)]
    run_epoch(model, torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler(device), chunks)
