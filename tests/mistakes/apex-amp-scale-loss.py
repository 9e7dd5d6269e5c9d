from apex import amp
from torch import nn


def learn(net, opt, x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(x).float(), y)
    with amp.scale_loss(loss, opt) as scaled:  # HS402
        scaled.backward()
    opt.step()
    return loss.detach()
