"""Nets for shards, and one run of each that any number of ranks, or one process over the same samples, goes through."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

import halfstep

NUM_WORDS = 11


class Block(nn.Module):
    """With what is easily rounded: a norm, biases, and a vector of the block itself."""

    def __init__(self, width=16, inner=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gain = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Words in, the next word out. ``head`` has fewer rows than 4 ranks could share, where ``num_out`` is 3."""

    def __init__(self, num_out=NUM_WORDS, inner=32):
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, 16)
        self.blocks = nn.ModuleList(Block(inner=inner) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, num_out)

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x)).flatten(0, 1).float()

    def run(self, block, x):
        return block(x)


class Uneven(Words):
    def __init__(self):
        super().__init__(num_out=3, inner=2)


class Checkpointed(Words):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class CheckpointedInside(Words):
    """The shards' hooks are run again as well."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False)


class Tied(Words):
    """The head is the table, and a second one is used by a module that it does not belong to."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.table.weight
        self.other = nn.Linear(16, 16)
        self.caller = nn.Identity()

    def run(self, block, x):
        return block(x) + linear(self.caller(x), self.other.weight)

    def forward(self, words):
        self.other(torch.zeros(1, 16))  # whoever runs first gathers for all outside the blocks
        return super().forward(words)


class Attention(nn.Module):
    """nn.MultiheadAttention uses the weights of a part that never runs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, NUM_WORDS)

    def forward(self, words):
        return self.head(self.encoder(self.table(words))).flatten(0, 1).float()


class Recurrent(nn.Module):
    """What stays fp32 by halfstep's rule: a recurrent layer, what a weight is computed from, statistics."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, 16)
        self.cell = nn.LSTM(16, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, NUM_WORDS))

    def forward(self, words):
        x = self.cell(self.table(words))[0].flatten(0, 1)
        return self.head(self.norm(x)).float()


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen
        self.a, self.b = nn.Linear(frozen.in_features, 3, bias=False), nn.Linear(3, frozen.out_features, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.b(self.a(x))


def adapted(dtype):
    """Words frozen in ``dtype``, with trained fp32 adapters in each block."""
    net = Words().requires_grad_(False).to(dtype)
    for block in net.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return net


NETS = {kind.__name__: kind for kind in (Words, Uneven, Checkpointed, CheckpointedInside, Tied, Attention, Recurrent)}
NETS |= {"AdaptedFp32": lambda: adapted(torch.float32), "AdaptedBf16": lambda: adapted(torch.bfloat16)}


def train(kind, policy, num_ranks, *, accumulate=1, fused=True, max_norm=None, num_steps=40, mesh=None, spikes=0.0,
          hair=0.0, hardware=None):  # fmt: skip
    """(reports, weights) of a run over shards, or of one process where no group is open.

    num_ranks: whose samples they are. spikes: share of micro-batches whose loss overflows at the first scale of fp16.
    hair:   by what part the learning rate is larger, to see how far a run gets from one that differs in last bits.
    """
    own = [distributed.get_rank()] if distributed.is_initialized() else range(num_ranks)
    torch.manual_seed(0)
    net = NETS[kind]()
    if distributed.is_initialized():
        mesh = mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        halfstep.distributed.shard(net, policy, mesh=mesh)
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2 * (1 + hair), fused=fused)
    stepper = halfstep.Stepper(net, optimizer, policy, accumulate=accumulate * len(own), max_norm=max_norm, watch=False,
                               hardware=hardware)  # fmt: skip
    g = torch.Generator().manual_seed(3)
    reports = []
    for _ in range(num_steps * accumulate):
        for rank in range(num_ranks):
            words = torch.randint(0, 3, (int(torch.randint(1, 5, (), generator=g)), 6), generator=g)
            factor = 3e3 if torch.rand((), generator=g) < spikes else 1.0
            if rank not in own:
                continue
            report = stepper.step(
                lambda words=words, factor=factor: (
                    cross_entropy(net(words), words.roll(1, -1).flatten(), reduction="sum") * factor,
                    float(words.numel()),
                )
            )
            reports += (
                [(report.loss, report.grad_norm, report.scale, report.applied, report.num_replays)] if report else []
            )
    return reports, {name: whole(weight).float() for name, weight in net.named_parameters()}


def whole(weight):
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()


def distance(run, other):
    """The largest differences of two runs: relative in losses and norms, absolute in weights."""
    (reports, weights), (others, other_weights) = run, other
    assert [r[3] for r in reports] == [r[3] for r in others]
    of_losses = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(reports, others, strict=True))
    of_norms = max(abs(a[1] - b[1]) / b[1] for a, b in zip(reports, others, strict=True))
    return of_losses, of_norms, max(float((weights[name] - other_weights[name]).abs().max()) for name in weights)
