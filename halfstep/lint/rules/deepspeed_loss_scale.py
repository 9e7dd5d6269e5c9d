"""HS175: the loss scale of a DeepSpeed configuration cannot do its work."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.config import Config
from halfstep.lint.rule import Problem, Rule


def check(config: Config) -> Iterator[Problem]:
    section = config.key("fp16")
    if section is None or not config.is_on("fp16"):
        return
    scale, window, floor = (config.get("fp16", key) for key in ("loss_scale", "loss_scale_window", "min_loss_scale"))
    if _is_number(scale) and scale > 0:
        yield _problem(
            config,
            "loss_scale",
            f"the loss scale stays at {scale:g}: one that overflows is never lowered, and "
            "every step is skipped from then on; set loss_scale to 0, which is dynamic",
        )
    elif _is_number(window) and window < 1:
        yield _problem(
            config,
            "loss_scale_window",
            f"a loss_scale_window of {window:g} has no step after which the scale may grow: leave it at 1000",
        )
    elif _is_number(floor) and floor <= 0:
        yield _problem(
            config,
            "min_loss_scale",
            f"with min_loss_scale {floor:g} the loss scale has no floor: it reaches 0, "
            "and every gradient with it; set 1",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problem(config: Config, key: str, message: str) -> Problem:
    node = config.key("fp16", key)
    assert node is not None
    return Problem(node, message)


RULE = Rule(
    code="HS175",
    name="deepspeed-loss-scale",
    severity="warning",
    summary="A DeepSpeed configuration fixes the loss scale, or takes its window or floor away.",
    why="""
`"loss_scale": 0` is the dynamic scale: halved when a gradient overflows, doubled after `loss_scale_window` clean steps
(1000 by default), never below `min_loss_scale` (1 by default). Any other value is a fixed scale. Gradients change by
orders of magnitude during a training; a fixed scale of 1024 that overflows in step 10,000 overflows in every later step
as well, and DeepSpeed skips them all.

With a floor of 0 the scale halves for as long as something overflows. 166 skips in a row take it from 65,536 to 0 in
fp32, and then every gradient is 0 or NaN. With a floor of 1 DeepSpeed stops the run there and says so.
""",
    bad=(
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {
        "enabled": True,
        "loss_scale": 1024,  # HS175
    },
    "zero_optimization": {"stage": 1},
}
""",
        """\
def config():
    return {
        "train_batch_size": 64,
        "fp16": {"enabled": True, "loss_scale_window": 1000, "min_loss_scale": 0.0},  # HS175
    }
""",
    ),
    good=(
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
    },
    "zero_optimization": {"stage": 1},
}
""",
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
}
""",
        """\
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": False, "loss_scale": 128},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
""",
    ),
    check=check,
    reads="deepspeed",
)
