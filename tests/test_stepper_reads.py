"""What a step costs: how often it waits for the device, and how often it walks over the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from reference.reads import Reads
from torch import nn

from halfstep import chunks, watcher
from halfstep.layouts import LAYOUTS
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch):
    """The guard also reads once a second, which a slow machine would show."""
    monkeypatch.setattr(watcher, "_LONGEST_S", math.inf)


X = torch.linspace(-2, 2, 64).reshape(8, 8).sin()
FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}
# torch's fused Adagrad takes found_inf from 2.12 on.
FUSED = {
    name: make
    for name, make in FUSED.items()
    if getattr(make([torch.ones(1, requires_grad=True)]), "_step_supports_amp_scaling", False)
}
PLAIN = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
NO_REPLAY = ["fp32", "bf16", "fp16 on_overflow=skip scale.init=256", "fp32 scale=static scale.init=256"]
REPLAY = "fp16 scale.init=256"


class Costs(Reads):
    """Counts reads to the host, and operations over a list with as many elements as the model's parameters."""

    def __init__(self, stepper):
        super().__init__()
        self.num_elements = sum(p.numel() for p in stepper.model.parameters())
        self.passes = []
        self.is_paused = False
        step = stepper.optimizer.step

        def own_step(*args, **kwargs):
            self.is_paused = True  # a plain optimizer's own reads and passes are its own
            try:
                return step(*args, **kwargs)
            finally:
                self.is_paused = False

        if not all(group.get("fused") for group in stepper.optimizer.param_groups):
            stepper.optimizer.step = own_step

    def see(self, name, args):
        if not self.is_paused:
            super().see(name, args)
            values = args[0] if args and isinstance(args[0], (list, tuple)) else []
            if sum(v.numel() for v in values if isinstance(v, torch.Tensor)) == self.num_elements:
                self.passes.append(name)


def net(norm=nn.Identity):
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm(), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def make(policy, optimizer, model=None, **kwargs):
    model = net() if model is None else model
    return Stepper(model, optimizer(model.parameters()), policy, **kwargs)


def loss_of(model):
    return (model(X) - 1).square().mean()


def test_the_counter_counts():
    stepper = make("fp32", PLAIN["sgd"])
    value = torch.ones(3)
    looks = [lambda: value[0].item(), lambda: bool(value[0]), lambda: float(value[0]), value.tolist, value.numpy,
             value.nonzero, lambda: value.equal(value), lambda: int(value[0])]  # fmt: skip
    for i, look in enumerate(looks):
        with Costs(stepper) as costs:
            look()
        assert costs.num_reads == 1, i


# --- fused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("policy", NO_REPLAY)
def test_a_fused_step_reads_nothing_and_walks_once_for_the_norm(policy, accumulate, max_norm, optimizer):
    stepper = make(policy, FUSED[optimizer], accumulate=accumulate, max_norm=max_norm)
    model, reports = stepper.model, []
    if optimizer == "sgd":  # its very first step is decided on the host
        reports += [stepper.step(lambda: loss_of(model)) for _ in range(accumulate)]
    for _ in range(2):
        with Costs(stepper) as costs:
            reports += [stepper.step(lambda: loss_of(model)) for _ in range(accumulate)]
        assert costs.num_reads == 0
        own = "_fused_sgd_" if optimizer == "sgd" else f"_fused_{optimizer}_"
        assert costs.passes == ["_foreach_norm", own]
    assert all(report.applied for report in reports if report)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fused_step_with_master_weights_reads_nothing(accumulate, layout, monkeypatch):
    """In slices, with an fp32 weight that is joined and split for each."""
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)
    model = nn.Sequential(nn.Linear(8, 1100), nn.Tanh(), nn.Linear(1100, 1))
    stepper = make(f"bf16 master={layout}", FUSED["adamw"], model, accumulate=accumulate, max_norm=0.1)
    calls = []
    monkeypatch.setattr(chunks, "slice_state", lambda *a, own=chunks.slice_state: calls.append(a) or own(*a))
    for factor in (1.0, float("nan"), 1.0):
        with Costs(stepper) as costs:
            report = [stepper.step(lambda factor=factor: loss_of(model) * factor) for _ in range(accumulate)][-1]
        assert costs.num_reads == 0
        assert report.applied is (factor == 1.0)
    assert calls


def test_the_first_step_of_fused_sgd_with_momentum_reads_once():
    stepper = make("bf16", FUSED["sgd"])
    with Costs(stepper) as costs:
        stepper.step(lambda: loss_of(stepper.model))
    assert costs.num_reads == 1


@pytest.mark.parametrize("policy", NO_REPLAY)
def test_counts_on_the_device_are_not_read_after_the_first(policy):
    stepper = make(policy, FUSED["adamw"], accumulate=2)
    closure = lambda: (loss_of(stepper.model) * 8, torch.tensor(8))  # noqa: E731
    with Costs(stepper) as costs:
        stepper.step(closure)
    assert costs.num_reads == (0 if policy in ("fp32", "bf16") else 1)
    for _ in range(2):
        with Costs(stepper) as costs:
            stepper.step(closure)
        assert costs.num_reads == 0


@pytest.mark.parametrize("policy", NO_REPLAY)
def test_a_bad_step_reads_nothing_either(policy):
    stepper = make(policy, FUSED["adamw"], max_norm=1.0)
    with Costs(stepper) as costs:
        report = stepper.step(lambda: loss_of(stepper.model) * float("nan"))
    assert costs.num_reads == 0
    assert not report.applied
    assert report.nonfinite_share is None  # nobody counted


@pytest.mark.parametrize("policy", [*NO_REPLAY, REPLAY])
def test_a_report_reads_once_whatever_is_asked_of_it(policy):
    stepper = make(policy, FUSED["adamw"])
    report = stepper.step(lambda: loss_of(stepper.model))
    with Costs(stepper) as costs:
        for _ in range(3):
            str(report), report.to_dict(), report.loss, report.applied, report.reason
    assert costs.num_reads == 1


def test_the_floor_is_looked_for_every_64_windows():
    reads = reads_of(make("fp32 scale=dynamic on_overflow=skip", FUSED["adamw"], watch=False), num_steps=130)
    assert [i + 1 for i, num in enumerate(reads) if num] == [64, 128]
    assert sum(reads) == 2


def test_the_guard_reads_ten_steps_together():
    """What is a read here is on CUDA a copy that nobody waits for."""
    reads = reads_of(make("fp32", FUSED["adamw"]), num_steps=25)
    assert [i + 1 for i, num in enumerate(reads) if num] == [10, 20]


def reads_of(stepper, num_steps):
    reads = []
    for _ in range(num_steps):
        with Costs(stepper) as costs:
            stepper.step(lambda: loss_of(stepper.model))
        reads.append(costs.num_reads)
    return reads


@pytest.mark.parametrize("who", ["scheduler", "on_applied", "batch norm"])
@pytest.mark.parametrize("policy", NO_REPLAY)
def test_who_needs_the_verdict_costs_one_read_a_window(who, policy):
    model = net(lambda: nn.BatchNorm1d(16)) if who == "batch norm" else net()
    optimizer = FUSED["adamw"](model.parameters())
    options = {"scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}, "batch norm": {}}
    options["on_applied"] = {"on_applied": lambda report: None}
    stepper = Stepper(model, optimizer, policy, accumulate=2, **options[who])
    for _ in range(3):
        with Costs(stepper) as costs:
            stepper.step(lambda: loss_of(model))
            stepper.step(lambda: loss_of(model))
        assert costs.num_reads == 1


# --- plain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", PLAIN)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("policy", NO_REPLAY)
def test_a_plain_step_reads_once_and_walks_at_most_once_more(policy, accumulate, max_norm, optimizer):
    stepper = make(policy, PLAIN[optimizer], accumulate=accumulate, max_norm=max_norm)
    for _ in range(2):
        with Costs(stepper) as costs:
            for _ in range(accumulate):
                report = stepper.step(lambda: loss_of(stepper.model))
        assert costs.num_reads == 1
        has_factor = max_norm is not None or accumulate > 1 or "scale" in policy
        assert costs.passes == ["_foreach_norm"] + ["_foreach_div_"] * has_factor
        assert report.applied


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_replay_reads_once_a_micro_batch(max_norm, accumulate):
    stepper = make(REPLAY, FUSED["adamw"], accumulate=accumulate, max_norm=max_norm)
    stepper.num_steps = 62  # no look at the floor at window 64: a replay notices it at once
    for _ in range(4):
        for micro_batch in range(accumulate):
            with Costs(stepper) as costs:
                report = stepper.step(lambda: loss_of(stepper.model))
            assert costs.num_reads == 1
            # A window of one micro-batch knows its norm from the verdict.
            walks = 2 if 1 < accumulate == micro_batch + 1 else 1
            assert costs.passes.count("_foreach_norm") == walks
    assert report.applied


@pytest.mark.parametrize("optimizer", PLAIN)
def test_replay_with_a_plain_optimizer_reads_once_more_a_window(optimizer):
    stepper = make(REPLAY, PLAIN[optimizer], accumulate=2)
    reads = []
    for _ in range(4):
        with Costs(stepper) as costs:
            stepper.step(lambda: loss_of(stepper.model))
        reads.append(costs.num_reads)
    assert reads == [1, 2, 1, 2]


def test_the_form_without_a_closure_does_not_read_under_a_policy_that_replays():
    stepper = make(REPLAY, FUSED["adamw"], accumulate=2)
    for _ in range(6):
        with Costs(stepper) as costs:
            with stepper.forward():
                loss = loss_of(stepper.model)
            stepper.backward(loss)
        assert costs.num_reads == 0


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("policy", NO_REPLAY)
def test_a_fused_step_on_a_gpu_never_waits(policy, optimizer):
    model = net().cuda()
    stepper = make(policy, FUSED[optimizer], model, accumulate=2, max_norm=1.0)
    x = X.cuda()
    closure = lambda: (model(x) - 1).square().mean()  # noqa: E731
    for _ in range(4):
        stepper.step(closure)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            report = stepper.step(closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.applied
