"""Planted differences of every kind: the contract stops all ranks with one text, which names rank and difference."""

import pytest
import torch
from reference.contract import A100, V100, OddAdamW, bits_of, flip, make, stopped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from halfstep import Contract, Stepper

ODD = 1
"""The rank that differs, of two."""


def of(default, odd):
    return odd if torch.distributed.get_rank() == ODD else default


def built(case):
    """What a Stepper says that is built in another way on one rank."""
    model, optimizer, kwargs = make(**BUILT[case][0]())
    return stopped(lambda: Stepper(model, optimizer, **kwargs))


BUILT = {
    "format": (
        lambda: {"policy": of("bf16", "fp16"), "hardware": of(A100, V100)},
        "rank 1 computes in fp16, rank 0 in bf16: its card is a Tesla V100-SXM2-16GB, and gradients of different "
        "precision would be averaged. Give every rank the same policy",
    ),
    "format of the same card": (
        lambda: {"policy": of("bf16", "fp16"), "hardware": A100},
        "rank 1 computes in fp16, rank 0 in bf16: gradients of different precision would be averaged.",
    ),
    "module rule": (
        lambda: {"policy": of("bf16", "bf16 module:2=fp32")},
        "rank 1 has the policy 'bf16 module:2=fp32', rank 0 'bf16'",
    ),
    "loss scale settings": (
        lambda: {"policy": of("fp16", "fp16 scale.init=256")},
        "rank 1 has the policy 'fp16 scale.init=256', rank 0 'fp16'",
    ),
    "what was asked for": (
        lambda: {"policy": of("auto", "bf16"), "hardware": A100},
        "rank 1 asks for 'bf16', rank 0 for 'auto'",
    ),
    "accumulate": (lambda: {"accumulate": of(2, 4)}, "rank 1 sets accumulate to 4, rank 0 to 2"),
    "max_norm": (lambda: {"max_norm": of(1.0, None)}, "rank 1 sets max_norm to None, rank 0 to 1.0"),
    "scheduler": (
        lambda: {"schedule": of(True, False)},
        "rank 1 sets scheduler to None, rank 0 to StepLR",
    ),
    "contract": (
        lambda: {"contract": of(Contract(), Contract(every=7))},
        "rank 1 sets contract to (7), rank 0 to (100)",
    ),
    "card": (
        lambda: {"policy": "fp16", "hardware": of(A100, V100)},
        "rank 1 computes with compute capability 7.0, fp16, fp32 in hardware, rank 0 with compute capability 8.0, "
        "bf16, fp16, fp32, tf32 in hardware: its card is a Tesla V100-SXM2-16GB",
    ),
    "wire": (
        lambda: {"wire": of("fp32", "bf16")},
        "rank 1 has as reduction bf16, rank 0 fp32",
    ),
    "format of a parameter": (
        lambda: {"frozen": ("0.bias",), "frozen_dtype": of(torch.float32, torch.bfloat16)},
        "rank 1 holds parameter 0.bias in bf16 of shape (8,), frozen, rank 0 in fp32 of shape (8,), frozen",
    ),
    "what is trained": (
        lambda: {"frozen": ("0.bias",), "thawed": of((), ("0.bias",))},
        "rank 1 holds parameter 0.bias in fp32 of shape (8,), trained, rank 0 in fp32 of shape (8,), frozen",
    ),
    "class of the optimizer": (
        lambda: {"optimizer": of(torch.optim.AdamW, torch.optim.Adam)},
        "rank 1 steps with torch.optim.adam.Adam, rank 0 with torch.optim.adamw.AdamW",
    ),
    "hyperparameter": (
        lambda: {"lr": of(0.001, 0.002)},
        "rank 1 sets lr of parameter group 0 to 0.002, rank 0 to 0.001",
    ),
    "hyperparameter in a tensor": (
        lambda: {"lr": of(torch.tensor(0.25), torch.tensor(0.5))},
        "rank 1 sets lr of parameter group 0 at 0.5, rank 0 at 0.25",
    ),
    "order of the parameters": (
        lambda: {"is_reversed": of(False, True)},
        "rank 1 moves in place 0 of parameter group 0 parameter 2.bias, rank 0 parameter 0.weight (and 3 more like it)",
    ),
}


@pytest.mark.parametrize("case", BUILT)
def test_what_is_built_in_another_way_is_found_before_the_first_step(world2, case):
    texts = world2.run(built, case)
    assert texts[0] == texts[1]
    assert texts[0].startswith(BUILT[case][1])


def another_torch():
    version, torch.__version__ = torch.__version__, of(torch.__version__, "2.0.1+other")
    try:
        return built_with(), built_with(contract=Contract(allow=("torch",)))
    finally:
        torch.__version__ = version


def built_with(**changes):
    model, optimizer, kwargs = make(**changes)
    return stopped(lambda: Stepper(model, optimizer, **kwargs))


def test_another_version_of_torch_is_found_and_can_be_allowed(world2):
    for text, allowed in world2.run(another_torch):
        assert text.startswith(f"rank 1 runs torch 2.0.1+other, rank 0 torch {torch.__version__}: ")
        assert allowed is None


def several_cards(policy, allow):
    return built_with(policy=policy, hardware=of(A100, V100), contract=Contract(allow=allow))


@pytest.mark.parametrize(("policy", "allow"), [("fp16", ("device",)), ("auto", ())])
def test_several_cards_go_on_where_they_are_allowed_and_under_auto(world2, policy, allow):
    assert world2.run(several_cards, policy, allow) == [None, None]


def odd_of_four(odd):
    is_odd = torch.distributed.get_rank() in odd
    return built_with(policy="fp16" if is_odd else "bf16", hardware=V100 if is_odd else A100)


@pytest.mark.parametrize(
    ("odd", "start"),
    [
        ([3], "rank 3 computes in fp16, ranks 0-2 in bf16: its card is a Tesla V100-SXM2-16GB, and"),
        ([0], "rank 0 computes in fp16, ranks 1-3 in bf16: its card is a Tesla V100-SXM2-16GB, and"),
        ([1, 2], "ranks 1-2 compute in fp16, ranks 0, 3 in bf16: their cards are a Tesla V100-SXM2-16GB, and"),
        ([0, 1, 3], "rank 2 computes in bf16, ranks 0-1, 3 in fp16: its card is an NVIDIA A100-SXM4-80GB, and"),
    ],
)
def test_the_most_ranks_are_right_and_of_two_halves_the_first(world4, odd, start):
    texts = world4.run(odd_of_four, odd)
    assert len(set(texts)) == 1
    assert texts[0].startswith(start)


# --- what a rank comes to, or loads ----------------------------------------------------------------------------------


def went_on(case, engine="ddp"):
    """What a step says after something has changed on one rank, and the weights before and after it."""
    changes, plant, _ = WENT_ON[case]
    model, optimizer, kwargs = make(engine, **changes)
    stepper = Stepper(model, optimizer, contract=Contract(every=2), **kwargs)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    step = lambda: stepper.step(lambda: model(x).square().mean())  # noqa: E731
    for _ in range(2):
        step()
    if torch.distributed.get_rank() == ODD:
        plant(stepper)
    before = [bits_of(p) for p in model.parameters()]
    text, again = stopped(step), stopped(step)
    return text, again, before == [bits_of(p) for p in model.parameters()]


def cast_states(stepper):
    for state in stepper.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def draw(stepper):
    torch.rand(3)


STOCHASTIC = {"policy": "bf16 master=stochastic"}
WENT_ON = {
    "step": ({}, lambda s: setattr(s, "num_steps", 7), "rank 1 is at step 7, rank 0 at step 2"),
    "unit": ({"policy": "fp16"}, lambda s: setattr(s, "_unit", 64.0), "rank 1 divides scaled sums by 64, rank 0 by 1"),
    "loss scale": (
        {"policy": "fp16"},
        lambda s: s.scale.value.fill_(256.0),
        "rank 1 has a loss scale at 256.0, rank 0 at 65536.0",
    ),
    "clean steps": (
        {"policy": "fp16"},
        lambda s: s.scale._num_clean.fill_(77),
        "rank 1 counts num_clean of the loss scale at 77, rank 0 at 2",
    ),
    "position in the window": (
        {},
        lambda s: setattr(s._window, "num_micro_batches", 3),
        "rank 1 holds 3 micro-batches of a window, rank 0 0 micro-batches",
    ),
    "promotion": (
        {},
        lambda s: s.region.promote("2"),
        "rank 1 has the policy 'bf16 module:2=fp32', rank 0 'bf16'",
    ),
    "format of states": (
        {},
        cast_states,
        "rank 1 keeps optimizer state exp_avg in bf16, rank 0 in fp32",
    ),
    "lost states": ({}, lambda s: s.optimizer.state.clear(), "rank 1 keeps optimizer state"),
    "seed of stochastic rounding": (
        STOCHASTIC,
        lambda s: setattr(s.masters, "_num_steps", 9),
        "rank 1 rounds stochastically, by the number of steps, at 9, rank 0 at 2",
    ),
    "places of stochastic rounding": (
        STOCHASTIC,
        lambda s: s.masters._places.update({s.ranks.module[0].weight: 1, s.ranks.module[2].weight: 0}),
        "rank 1 rounds stochastically, by the place of 0.weight, at 1, rank 0 at 0 (and 1 more like it)",
    ),
    "generator of an optimizer that rounds": (
        {"optimizer": OddAdamW},
        draw,
        "rank 1 rounds stochastically, by torch's generator, at its state ",
    ),
    "weight": ({}, lambda s: flip(s.ranks.module[0].weight), "rank 1 holds parameter 0.weight with checksum "),
    "last bias": ({}, lambda s: flip(s.ranks.module[2].bias, 2, 31), "rank 1 holds parameter 2.bias with checksum "),
    "frozen weight": (
        {"frozen": ("0.weight",)},
        lambda s: flip(s.ranks.module[0].weight),
        "rank 1 holds parameter 0.weight with checksum ",
    ),
    "rest of a master weight": (
        {"policy": "bf16 master=split16"},
        lambda s: flip(s.masters.named_rests()["2.weight"]),
        "rank 1 holds the rest of master weight 2.weight with checksum ",
    ),
    "16-bit weight": (
        {"policy": "bf16 master=split16"},
        lambda s: flip(s.ranks.module[0].weight),
        "rank 1 holds parameter 0.weight with checksum ",
    ),
    "gradient": (
        {},
        lambda s: s._comparison.gradients.popitem(),
        "rank 1 has the gradient of 2.bias not at all, rank 0 in fp32",
    ),
}


@pytest.mark.parametrize("case", WENT_ON)
def test_what_a_rank_comes_to_is_found_at_the_next_comparison(world2, case):
    (text, again, is_kept), (text_1, again_1, is_kept_1) = world2.run(went_on, case)
    assert text.startswith(WENT_ON[case][2])
    assert text == again == text_1 == again_1  # it stays so, and nobody waits for anybody
    assert is_kept
    assert is_kept_1


# --- shards ----------------------------------------------------------------------------------------------------------


def sharded(sizes, odd):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model, _, kwargs = make(None)
    fully_shard(model, mesh=mesh)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), contract=Contract(every=1), **kwargs)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    step = lambda: stepper.step(lambda: model(x).square().mean())  # noqa: E731
    step()
    if torch.distributed.get_rank() == odd:
        flip(model[0].weight.to_local())
    return stopped(step)


def test_shards_that_are_held_twice_are_compared_among_those_who_hold_them(world4):
    """Over a mesh of 2 x 2 ranks 0 and 2 hold the first half of each weight, ranks 1 and 3 the second."""
    texts = world4.run(sharded, (2, 2), 3)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 3 holds parameter 0.weight with checksum ")
    assert "rank 1 with checksum" in texts[0]


def test_a_shard_that_nobody_else_holds_is_not_compared(world2):
    assert world2.run(sharded, (2,), 1) == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["fp32", "split16", "stochastic"])
def test_digests_on_cuda_are_those_of_the_cpu(layout):
    from halfstep.ranks.digests import sum_of_bits

    model = make(None)[0].cuda()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), f"bf16 master={layout}")
    stepper.step(lambda: model(torch.randn(2, 4, device="cuda")).square().mean())
    for tensor in [*model.parameters(), *stepper.masters.rests()]:
        assert sum_of_bits(tensor).item() == sum_of_bits(tensor.cpu()).item()
