"""The table of what never existed is true for the torch that is installed."""

import inspect
import warnings

import pytest
import torch

from halfstep.lint.check import check_source
from halfstep.lint.never_existed import ARGUMENTS, FIRST_ARGUMENT, NAMES, NEEDS_DEVICE, SCALER_ATTRIBUTES
from halfstep.lint.rules.argument_that_never_existed import RULE


def resolve(name):
    """The object behind a qualified name; AttributeError when there is none."""
    value = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def problems(text):
    return [(finding.line, finding.message) for finding in check_source(text, "x.py", [RULE])]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_torch(name):
    assert set(inspect.signature(resolve(name)).parameters) == ARGUMENTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_name_is_not_in_torch(name):
    with pytest.raises(AttributeError):
        resolve(name)


@pytest.mark.parametrize("name", NEEDS_DEVICE)
def test_device_is_needed(name):
    with pytest.raises(TypeError, match="device_type"):
        resolve(name)()
    if NEEDS_DEVICE[name] is None:
        with pytest.raises(TypeError, match="device_type"):
            resolve(name)(lambda ctx: ctx)


@pytest.mark.parametrize("name", FIRST_ARGUMENT)
def test_first_argument_is_another_one_and_torch_takes_the_wrong_type(name):
    wrong, what = FIRST_ARGUMENT[name]
    first = next(iter(inspect.signature(resolve(name)).parameters))
    assert what.startswith(f"`{first}`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolve(name)("cpu" if wrong is str else 4096.0)


@pytest.mark.parametrize("name", SCALER_ATTRIBUTES)
def test_scaler_has_no_such_attribute(name):
    assert not hasattr(torch.amp.GradScaler("cpu"), name)


def test_matmul_switch_raises_and_cudnn_takes_it_in_silence(monkeypatch):
    with pytest.raises(AttributeError, match="Unknown attribute allow_bf16"):
        torch.backends.cuda.matmul.allow_bf16 = True
    monkeypatch.setattr(torch.backends.cudnn, "allow_bf16", True, raising=False)
    assert torch.backends.cudnn.allow_bf16


def test_every_argument_and_attribute_that_torch_has_is_left_alone():
    scaler = torch.amp.GradScaler("cpu")
    real = [name for name in dir(scaler) if not name.startswith("__")]
    lines = ["import torch", "scaler = torch.amp.GradScaler('cuda')", *(f"scaler.{name}" for name in real)]
    for name, arguments in ARGUMENTS.items():
        lines.append(f"{name}({', '.join(f'{argument}=value' for argument in sorted(arguments))})")
    assert problems("\n".join(lines)) == []


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("torch.cuda.amp.autocast(device_type='cuda')", "device_type"),
        ("torch.cuda.amp.autocast('cuda')", "`enabled`"),
        ("torch.cpu.amp.GradScaler('cpu')", "`init_scale`"),
        ("torch.amp.GradScaler(True)", "`device`"),
        ("torch.amp.GradScaler('cuda', dtype=torch.float16)", "dtype"),
        ("torch.autocast('cuda', autocast=True)", "autocast="),
        ("torch.autocast()", "without device_type"),
        ("torch.amp.custom_bwd(device_type='cuda', cast_inputs=torch.float32)", "cast_inputs"),
        ("torch.backends.cuda.matmul.allow_bf16 = True", "no switch"),
        ("torch.cuda.amp.GradScaler().get_loss_scale()", "get_scale()"),
        ("@torch.amp.custom_fwd\ndef forward(ctx): ...", "without device_type"),
    ],
)
def test_each_kind_of_entry_is_reported(line, word):
    found = problems(f"import torch\n{line}\n")
    assert [number for number, _ in found] == [2]
    assert word in found[0][1]


@pytest.mark.parametrize(
    "line",
    [
        "torch.autocast(**settings)",
        "torch.autocast(*settings)",
        "torch.amp.GradScaler(device)",
        "torch.amp.custom_fwd(forward, device_type='cuda')",
        "half.fp16",
        "scaler.found_inf",
    ],
)
def test_what_may_be_right_is_left_alone(line):
    assert problems(f"import torch\ndef run(settings, device, forward, half, scaler):\n    {line}\n") == []


STEP = """\
import torch


def step(scaler, opt, loss):
    scaler.scale(loss).backward()
    scaler.unscale(opt)
    {step}
    scaler.update()
"""


def test_scaler_of_unknown_make_counts_only_when_it_is_used_like_torchs():
    assert [number for number, _ in problems(STEP.format(step="scaler.step(opt)"))] == [6]
    assert problems(STEP.format(step="opt.step()")) == []
    assert (
        problems(STEP.format(step="scaler.step(opt)").replace("import torch\n", "import torch\nimport paddle\n")) == []
    )
