"""replicate(): DistributedDataParallel in one line, that may stay in on one device; gradients in fp32 or bf16."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import HalfstepError, Stepper

LR = 0.05


def net():
    torch.manual_seed(distributed.get_rank() if distributed.is_initialized() else 0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch_of(number, rank):
    g = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(int(torch.randint(1, 6, (), generator=g)), 6, generator=g)


def train(policy, wire, accumulate=2, num_steps=4, held=0):
    """Weights and reports of a run; ``held``: micro-batches of this rank in one more window, which ends early."""
    own = [distributed.get_rank()] if distributed.is_initialized() else [0, 1]
    model = halfstep.distributed.replicate(net(), wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    stepper = Stepper(model, optimizer, policy, accumulate=accumulate * len(own), max_norm=1.0, watch=False)
    reports = []
    for number in range(num_steps * accumulate + held):
        for rank in own:
            x = batch_of(number, rank)
            report = stepper.step(lambda x=x: (model(x).square().sum(), float(len(x))))
            reports += [report] if report else []
    reports += [stepper.flush()] if held else []
    weights = {name: value.numpy().copy() for name, value in stepper.weights()}
    return weights, [(r.loss, r.grad_norm, r.scale, r.applied) for r in reports], stepper.ranks.describe()


TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-7}
"""Relative, of gradients: fp32 sums in another order; half an ulp of bf16 twice."""


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["fp32", "fp16 scale.init=65536", "bf16 master=split16"])
@pytest.mark.parametrize("held", [0, 1])
def test_replicas_train_as_one_process_does(world2, policy, wire, held):
    (weights, reports, described), (others, other_reports, _) = world2.run(train, policy, wire, 2, 4, held)
    expected, expected_reports, alone = train(policy, wire, held=held)
    assert described["reduction"] == wire
    assert alone == {"engine": "one process"}
    assert reports == other_reports
    assert all((weights[name] == others[name]).all() for name in weights)
    tolerance = max(TOLERANCE[wire], TOLERANCE["fp32" if policy == "fp32" else "bf16"])
    for name, value in expected.items():
        # The gradient is clipped to 1, so that a step moves no weight by more than LR; twice, since errors compound.
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2 * LR * len(reports) * tolerance)
    for a, b in zip(reports, expected_reports, strict=True):
        assert a[3] == b[3]
        assert a[:2] == pytest.approx(b[:2], rel=tolerance)


def starts():
    model = halfstep.distributed.replicate(net())
    return [p.detach().numpy() for p in model.parameters()], type(model)


def test_ranks_begin_with_the_weights_of_the_first(world2):
    (first, kind), (second, _) = world2.run(starts)
    assert kind is DistributedDataParallel
    torch.manual_seed(0)
    for a, b, weight in zip(first, second, net().parameters(), strict=True):
        assert (a == b).all()
        assert (a == weight.detach().numpy()).all()


def test_the_line_may_stay_on_one_device(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = net()
    assert halfstep.distributed.replicate(model, wire="bf16", find_unused_parameters=True) is model
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert halfstep.distributed.replicate(model) is model


def test_one_of_several_processes_needs_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(HalfstepError, match=r"one of 4 processes .* halfstep.distributed.start\(\) first"):
        halfstep.distributed.replicate(net())


def test_fp16_does_not_travel():
    with pytest.raises(HalfstepError, match=r"wire='fp16': .* beyond 65504"):
        halfstep.distributed.replicate(net(), wire="fp16")


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def refusal(kind):
    arguments, model = {"wire": "bf16"}, net()
    if kind == "twice":
        model = nn.Sequential(DistributedDataParallel(model))
    if kind == "sparse":
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    if kind == "complex":
        model = nn.Sequential(Complex())
    if kind == "mixed_precision":
        from torch.nn.parallel.distributed import _MixedPrecision

        arguments["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(HalfstepError) as error:
        halfstep.distributed.replicate(model, **arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("twice", "would be averaged twice"),
        ("sparse", "module 0, whose gradients are sparse"),
        ("complex", "parameter 0.weight, which is torch.complex64"),
        ("mixed_precision", "mixed_precision: that reduces gradients by a communication hook of its own"),
    ],
)
def test_what_cannot_travel_is_refused(world2, kind, message):
    for said in world2.run(refusal, kind):
        assert message in said


def own_hook(kind):
    model = DistributedDataParallel(net())
    if kind == "hook":
        model.register_comm_hook(None, allreduce_hook)
    if kind == "built-in":
        model._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=False)
    report = stepper.step(lambda: model(batch_of(0, distributed.get_rank())).square().mean())
    return stepper.ranks.describe()["reduction"], report.loss


@pytest.mark.parametrize(("kind", "reduction"), [("none", "fp32"), ("hook", "unknown"), ("built-in", "unknown")])
def test_a_wrapper_of_the_users_own_works_as_before(world2, kind, reduction):
    """What a hook that is not ours does with formats is not known, and said to be so."""
    first, second = world2.run(own_hook, kind)
    assert first == second
    assert first[0] == reduction


def in_a_group_of_one():
    groups = [distributed.new_group([rank]) for rank in range(2)]
    group = groups[distributed.get_rank()]
    model = halfstep.distributed.replicate(net(), wire="bf16", process_group=group)
    model(torch.full((1, 6), 0.3)).sum().backward()
    gradient = model.module[0].weight.grad
    return bool((gradient == gradient.bfloat16()).all())


def test_a_rank_alone_sends_nothing_and_rounds_nothing(world2):
    assert world2.run(in_a_group_of_one) == [False, False]


@pytest.mark.gpu
def test_on_a_gpu_the_model_stays_on_its_device(tmp_path):
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = halfstep.distributed.replicate(net().cuda(), wire="bf16")
        assert model.device_ids == [torch.cuda.current_device()]
    finally:
        distributed.destroy_process_group()
