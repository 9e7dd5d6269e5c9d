"""Operations counted one by one, in loops over what multiplies, and the small models on which counts are compared.

``reference/flops.py:gpt`` and the like are workloads: each draws the same batch forever.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import Workload

# --- the plain twin: 2 for each pair of numbers that is multiplied and added ---------------------------------------


def product(rows, inner, columns):
    return sum(2 for _ in itertools.product(range(rows), range(inner), range(columns)))


def convolution(batch, weight_shape, positions, groups):
    """``positions``: of the output; of the input, where it is transposed, whose weight has its channels swapped."""
    first, per_group, *taps = weight_shape
    count = 0
    for _ in range(batch):
        for _ in itertools.product(*(range(size) for size in positions)):
            for group in range(groups):
                for _ in range(group * first // groups, (group + 1) * first // groups):
                    for _ in range(per_group):
                        count += sum(2 for _ in itertools.product(*(range(size) for size in taps)))
    return count


def attention(batch, heads, queries, keys, width, num_products, is_causal):
    """``num_products`` of one query with one key: 2 forward, 5 backward, the scores among them once more."""
    count = 0
    for _ in range(batch * heads):
        for query in range(queries):
            for key in range(keys):
                if key <= query or not is_causal:
                    count += num_products * 2 * width
    return count


def recurrence(batch, time, to_input, to_state):
    """Forward, of one layer: ``to_input`` and ``to_state`` are the shapes of its matrices."""
    return sum(product(batch, *reversed(to_input)) + product(batch, *reversed(to_state)) for _ in range(time))


# --- workloads -----------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 96, 32, 2, 2, 16, 4


def _endless(batch):
    while True:
        yield batch


def _workload(model, batch, loss, **more):
    more.setdefault("optimizer", lambda parameters: torch.optim.AdamW(parameters, fused=True))
    return Workload(model=model, batches=_endless(batch), loss=loss, **more)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, checkpoints=False):
        super().__init__()
        self.checkpoints = checkpoints
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def _next_token(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def gpt(seed, **more):
    tokens = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long)
    return _workload(GPT(**more), tokens, _next_token)


def checkpointed(seed):
    return gpt(seed, checkpoints=True)


def odd_vocabulary(seed):
    return gpt(seed, vocabulary=97)


def accumulating(seed):
    tokens = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long)
    return _workload(GPT(), tokens, _next_token, accumulate=3)


CONVOLUTIONS = {
    "strided": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "grouped": nn.Conv2d(6, 4, (3, 2), groups=2, dilation=(1, 2)),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4, padding=1),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
}
"""One after the other; the first one's input is data, which takes no gradient."""
IMAGE = (4, 9, 8)


def convolutions(seed):
    model = nn.ModuleDict({name: type(layer)(*_arguments(layer)) for name, layer in CONVOLUTIONS.items()})

    def loss(model, images):
        for layer in model.values():
            images = layer(images)
        return images.square().mean()

    return _workload(model, torch.zeros(2, *IMAGE), loss)


def _arguments(layer):
    start = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
    if isinstance(layer, nn.ConvTranspose2d):
        return (*start, layer.output_padding, layer.groups)
    return (*start, layer.dilation, layer.groups)


class Reader(nn.Module):
    """An LSTM over embedded tokens, time first."""

    def __init__(self):
        super().__init__()
        self.token, self.lstm = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 12)

    def forward(self, tokens):
        return self.lstm(self.token(tokens.t()))[0]


def reader(seed):
    return _workload(Reader(), torch.zeros(BATCH, 5, dtype=torch.long), lambda m, batch: m(batch).square().mean())


@torch.library.custom_op("flops_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, grad: 2 * grad)


class Contrastive(nn.Module):
    """Scores each sample against each other one, and selects by a mask."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        y = self.project(double(x))
        scores = y @ y.t()
        return scores[torch.ones(scores.shape, dtype=torch.bool)].mean()


def contrastive(seed):
    return _workload(Contrastive(), torch.zeros(BATCH, 8), lambda m, batch: m(batch))


# --- a network of ResNet-50's shape, for the published figures ------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1, each with its norm, beside a shortcut."""

    def __init__(self, num_in, width, stride):
        super().__init__()
        self.reduce, self.reduce_norm = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.mix, self.mix_norm = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.widen, self.widen_norm = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Identity()
        if num_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        y = F.relu(self.reduce_norm(self.reduce(x)), inplace=True)
        y = F.relu(self.mix_norm(self.mix(y)), inplace=True)
        return F.relu(self.widen_norm(self.widen(y)) + self.shortcut(x), inplace=True)


def resnet50(seed):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    num_in = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for index in range(depth):
            layers.append(Bottleneck(num_in, 64 * 2**stage, 2 if stage and not index else 1))
            num_in = 256 * 2**stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))
    batch = (torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)  # noqa: E731
    return _workload(model, batch, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), optimizer=sgd)
