"""HS174: a DeepSpeed configuration turns on fp16 and bf16."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.config import Config
from halfstep.lint.rule import Problem, Rule


def check(config: Config) -> Iterator[Problem]:
    for name in ("bf16", "bfloat16"):
        key = config.key(name)
        if key is not None and config.is_on("fp16") and config.is_on(name):
            yield Problem(key, f"fp16 and {name} are both enabled: DeepSpeed refuses that; enable one of them")


RULE = Rule(
    code="HS174",
    name="deepspeed-both-formats",
    severity="error",
    summary="A DeepSpeed configuration enables fp16 and bf16.",
    why="""
DeepSpeed keeps the weights in one 16-bit format and refuses a configuration with two: `AssertionError: bfloat16 and
fp16 modes cannot be simultaneously enabled`. They are no two ways to the same run: fp16 ends at 65,504 and needs a loss
scale, bf16 reaches 3.4e38 and needs none. A model that was pretrained in bf16 may overflow in fp16.

Enable the one that the cards have in hardware: bf16 from compute capability 8.0 on, else fp16. `"auto"` in both leaves
the choice to the Transformers flags and is fine.
""",
    bad=(
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True, "loss_scale": 0},
    "bf16": {"enabled": True},  # HS174
    "zero_optimization": {"stage": 2},
}
""",
        """\
def config(stage):
    return {
        "zero_optimization": {"stage": stage},
        "bfloat16": {"enabled": True},  # HS174
        "gradient_accumulation_steps": 8,
        "fp16": {"enabled": True},
    }
""",
    ),
    good=(
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
""",
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
""",
        """\
CONFIG = {
    "train_batch_size": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
}
""",
    ),
    check=check,
    reads="deepspeed",
)
