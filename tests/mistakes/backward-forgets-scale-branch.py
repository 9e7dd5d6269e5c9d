import torch
from torch import nn
from torch.amp import GradScaler


def distil(student, teacher, loader, alpha=0.7):
    student, teacher = student.cuda(), teacher.cuda().eval()
    opt = torch.optim.AdamW(student.parameters(), lr=1e-4)
    scaler = GradScaler("cuda")
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                soft = teacher(x)
            out = student(x)
        hard = nn.functional.cross_entropy(out.float(), y)
        match = nn.functional.kl_div(out.float().log_softmax(-1), soft.float().softmax(-1), reduction="batchmean")
        scaler.scale((1 - alpha) * hard).backward(retain_graph=True)
        (alpha * match).backward()  # HS104
        scaler.step(opt)
        scaler.update()
