"""Bytes a parameter: weights, master weights, casts, gradients, optimizer states, and the peak of a whole step.

Measured on a transformer with 50 million parameters, in its third step, with clipping and the verdict switched on, for
torch.amp with fused AdamW and for every layout of master weights, each with fp32 states and with 8-bit ones (torchao's
and bitsandbytes' AdamW8bit, where they are installed). Each row runs in a process of its own.

To reach at the peak: 14 bytes with split16 and fp32 states (16 when accumulating, since the sums are fp32), 8 with
8-bit states (10), 7 with split8 and 8-bit states (9). The bound, in bytes a parameter: a bf16 weight 2, its rest 2 or
1, gradient 2 (sum 4), AdamW's moments 8, or 2 x (1 + 4/256) = 2.03 with 8 bits and one fp32 scale for 256 elements.

    python benchmarks/memory.py                 the table
    python benchmarks/memory.py --only split16  its rows alone
    python benchmarks/memory.py --figure docs/master-weights.svg    the table and its picture

Counted are the tensors (halfstep/compare/memory.py), so that the figures are the same on every machine. The last column
is what the process grew by, which has the allocator's rounding and the kernels' own buffers in it as well. The batch is
2 tokens, so that activations stay near 0.02 bytes a parameter; they are in the peak.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

TOKENS = 2
STATES = ("fp32", "torchao", "bitsandbytes")
LAYOUTS = ("fp32", "copy", "split16", "split8", "kahan", "stochastic")
GOALS = {
    ("split16", "fp32", 1): 14,
    ("split16", "fp32", 2): 16,
    ("split16", "torchao", 1): 8,
    ("split16", "torchao", 2): 10,
    ("split16", "bitsandbytes", 1): 8,
    ("split16", "bitsandbytes", 2): 10,
    ("split8", "torchao", 1): 7,
    ("split8", "torchao", 2): 9,
    ("split8", "bitsandbytes", 1): 7,
    ("split8", "bitsandbytes", 2): 9,
}


def measure(engine: str, layout: str, states: str, accumulate: int, width: int, layers: int) -> dict[str, float]:
    """One row, in bytes a parameter, of a model with ``layers`` blocks. Its head and embedding are 2 % of it each."""
    import torch
    from torch import nn

    from halfstep import Hardware, Stepper
    from halfstep.compare.memory import LiveBytes

    class Casts(LiveBytes):
        """Also the most that casts of weights, made by autocast, held at one time."""

        def __init__(self, weights: set[int]) -> None:
            super().__init__()
            self.weights, self.cast, self.peak_cast = weights, 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            is_cast = func is torch.ops.aten._to_copy.default and result.element_size() == 2
            if is_cast and args[0].data_ptr() in self.weights:
                storage = result.untyped_storage()
                self.cast += storage.nbytes()
                self.peak_cast = max(self.peak_cast, self.cast)
                weakref.finalize(storage, self.drop, storage.nbytes())
            return result

        def drop(self, size: int) -> None:
            self.cast -= size

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).view(1, -1, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    # torch's own 16-bit products, as on a card: cpu16 widens a product's operands for its moment.
    hardware = Hardware("cpu", "any", native=frozenset({"fp32", "bf16"}), emulated=frozenset())
    vocabulary = 2048
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Embedding(vocabulary, width), *(Block() for _ in range(layers)), nn.Linear(width, vocabulary)
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    if states == "fp32":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    elif states == "torchao":
        from torchao.optim import AdamW8bit

        # Its compiler takes minutes on a CPU, and changes no figure but the time.
        torch.compile = lambda function, **_: function  # type: ignore[assignment]
        optimizer = AdamW8bit(model.parameters(), lr=1e-4)
    else:
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)
    tokens = torch.randint(vocabulary, (accumulate, 1, TOKENS))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch)[0].float(), batch[0])

    masters: list[torch.Tensor] = []
    if engine == "torch.amp":
        scaler = torch.amp.GradScaler("cpu", enabled=False)

        def step() -> None:
            for batch in tokens:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(batch) / accumulate
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    else:
        stepper = Stepper(
            model, optimizer, f"bf16 master={layout}", accumulate=accumulate, max_norm=1.0, hardware=hardware
        )
        masters = [rest.low for rest in stepper.masters._rests.values() if rest.low is not None]

        def step() -> None:
            for batch in tokens:
                report = stepper.step(lambda batch=batch: loss_of(batch))
            assert report is not None
            assert report.applied

    step()  # makes the states
    held = [t for state in optimizer.state.values() for v in state.values() for t in inner(v)]
    live = Casts({p.data_ptr() for p in model.parameters()})
    live.count([p.data for p in model.parameters()])
    weights = live.now
    live.count(masters)
    with_masters = live.now
    live.count(held)
    with_states = live.now
    largest_gradient = [0]

    def count_gradients(_: torch.Tensor) -> None:
        now = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
        largest_gradient[0] = max(largest_gradient[0], now)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count_gradients)
    del held, masters
    with live:
        step()
        step()
    return {
        "weights": weights / num_parameters,
        "masters": (with_masters - weights) / num_parameters,
        "states": (with_states - with_masters) / num_parameters,
        "casts": live.peak_cast / num_parameters,
        "gradients": largest_gradient[0] / num_parameters,
        "peak": live.peak / num_parameters,
        "process": resident() / num_parameters,
        "parameters": num_parameters,
    }


def inner(value: Any) -> list[Any]:
    """The plain tensors of an optimizer's state; a quantised one has several."""
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [value] if hasattr(value, "untyped_storage") else []


def resident() -> float:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


SHOWN = {"weights": "#1f5fb3", "masters": "#7ba7dd", "gradients": "#b3401f", "states": "#2f7d4f", "other": "#bbb"}


def draw(rows: dict[str, dict[str, float]]) -> str:
    """Stacked bars: what is alive at the peak, a bar a row; ``other`` is casts, activations and temporaries."""
    left, bar, unit = 300, 22, 20.0
    height = 70 + bar * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="740" height="{height}" fill="white"/>',
    ]
    for place, (name, color) in enumerate(SHOWN.items()):
        x = left + 85 * place
        lines.append(
            f'<rect x="{x}" y="12" width="12" height="12" fill="{color}"/><text x="{x + 17}" y="23">{name}</text>'
        )
    for place, (name, row) in enumerate(rows.items()):
        y, x = 40 + bar * place, float(left)
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
        parts = row | {"other": row["peak"] - sum(row[key] for key in list(SHOWN)[:-1])}
        for key, color in SHOWN.items():
            width = max(parts[key], 0.0) * unit
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{bar - 5}" fill="{color}"/>')
            x += width
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{row["peak"]:.1f}</text>')
    lines.append(f'<text x="{left}" y="{height - 8}">bytes a parameter at the peak of a step</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes a parameter at the peak of a training step.")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--figure", type=Path, help="where to write the picture")
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        engine, layout, states, accumulate = arguments.row
        # A small model first, so that what libraries take once is not counted.
        measure(engine, layout, states, int(accumulate), 64, 1)
        before = resident()
        row = measure(engine, layout, states, int(accumulate), 448, 20)
        row["process"] -= before / row["parameters"]
        print(json.dumps(row))
        return
    rows = [("torch.amp", "fp32", states, a) for states in STATES for a in (1, 2)]
    rows += [("halfstep", layout, states, a) for layout in LAYOUTS for states in STATES for a in (1, 2)]
    drawn: dict[str, dict[str, float]] = {}
    header = ("weights", "masters", "casts", "gradients", "states", "peak", "process")
    print(f"{'bytes a parameter':44}" + "".join(f"{name:>10}" for name in header), flush=True)
    for engine, layout, states, accumulate in rows:
        name = f"{engine} {layout}, {states} states" + (", accumulating" if accumulate > 1 else "")
        if arguments.only not in name:
            continue
        if states != "fp32" and importlib.util.find_spec(states) is None:
            print(f"{name:44}  {states} is not installed")
            continue
        command = [sys.executable, __file__, "--row", engine, layout, states, str(accumulate)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:44}  failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        if accumulate == 1:
            drawn[name] = row
        goal = GOALS.get((layout, states, accumulate)) if engine == "halfstep" else None
        print(
            f"{name:44}" + "".join(f"{row[key]:10.2f}" for key in header) + (f"  (goal {goal})" if goal else ""),
            flush=True,
        )
    if arguments.figure:
        arguments.figure.write_text(draw(drawn))
    has_flash = importlib.util.find_spec("flashoptim") is not None
    print("flashoptim: needs CUDA, so it was not run" if has_flash else "flashoptim is not installed")


if __name__ == "__main__":
    main()
