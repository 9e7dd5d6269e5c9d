import torch
from torch import nn
from torch.amp import GradScaler as GS

vocab, width = 5000, 128
embedding = nn.EmbeddingBag(vocab, width, mode="sum").cuda()
classifier = nn.Linear(width, 12).cuda()
sparse_opt = torch.optim.Adagrad(embedding.parameters(), lr=0.05)
dense_opt = torch.optim.AdamW(classifier.parameters(), lr=1e-3)
gs = GS("cuda")


def fit(batches):
    for words, offsets, topic in batches:
        for o in (sparse_opt, dense_opt):
            o.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = classifier(embedding(words.cuda(), offsets.cuda()))
            loss = nn.functional.cross_entropy(logits.float(), topic.cuda())
        gs.scale(loss).backward()
        gs.step(dense_opt)
        sparse_opt.step()  # HS105
        gs.update()
