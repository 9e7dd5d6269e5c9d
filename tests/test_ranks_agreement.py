"""What ranks find out together while a Stepper is built: the policy of ``auto``, and that none of them failed."""

from dataclasses import replace

import pytest
import torch
from reference.contract import A100, PASCAL, V100, make, stopped

from halfstep import HalfstepError, Stepper
from halfstep.hardware import Hardware
from halfstep.policy import Policy, auto_policy
from halfstep.ranks.agreement import _agreed

TURING = Hardware.of("cuda", "Tesla T4", capability=(7, 5))
CPU = Hardware.of("cpu", "Zen 5", features={"avx512_bf16"})
OLD_CPU = Hardware.of("cpu", "Zen 2")
CARDS = {"A100": A100, "V100": V100, "1080": PASCAL, "T4": TURING, "Zen 5": CPU, "Zen 2": OLD_CPU}


@pytest.mark.parametrize(
    ("cards", "compute", "reason"),
    [
        (["A100", "A100", "A100", "V100"], "fp16", "rank 3 (Tesla V100-SXM2-16GB) has no bf16: fp16 on all ranks"),
        (
            ["V100", "A100", "T4", "V100"],
            "fp16",
            "ranks 0, 2-3 (Tesla V100-SXM2-16GB and Tesla T4) have no bf16: fp16 on all ranks",
        ),
        (
            ["A100", "1080"],
            "fp32",
            "rank 1 (NVIDIA GeForce GTX 1080) has no bf16 and no fp16: fp32 on all ranks",
        ),
        (["V100", "1080"], "fp32", "rank 1 (NVIDIA GeForce GTX 1080) has no fp16: fp32 on all ranks"),
        (
            ["A100", "V100", "1080"],
            "fp32",
            "ranks 1-2 (Tesla V100-SXM2-16GB and NVIDIA GeForce GTX 1080) have no bf16, rank 2 (NVIDIA GeForce GTX "
            "1080) has no fp16: fp32 on all ranks",
        ),
        (["Zen 5", "Zen 2"], "fp32", "rank 1 (Zen 2) has no bf16: fp32 on all ranks"),
    ],
)
def test_auto_is_the_best_format_that_all_cards_have(cards, compute, reason):
    devices = [CARDS[card] for card in cards]
    policy, why = _agreed(devices, range(len(devices)))
    assert (policy, why) == (Policy(compute), reason)
    # No rank gets more than it has by itself, and somebody gets less.
    alone = [auto_policy(device)[0].compute for device in devices]
    order = ["bf16", "fp16", "fp32"].index
    assert order(compute) == max(map(order, alone)) > min(map(order, alone))


def test_ranks_that_find_the_same_have_reasons_of_their_own():
    assert _agreed([A100, replace(A100, name="NVIDIA H100")], [0, 1]) is None
    assert _agreed([V100, TURING], [0, 1]) is None


def agreed(policy, cards):
    model, optimizer, kwargs = make(policy=policy, hardware=CARDS[cards[torch.distributed.get_rank()]])
    stepper = Stepper(model, optimizer, **kwargs)
    report = stepper.step(lambda: model(torch.ones(2, 4)).square().mean())
    return stepper.info.to_dict(), report.applied


def test_a_mixed_cluster_trains_under_auto_and_says_why(world4):
    results = world4.run(agreed, "auto module:2=fp32", ["A100", "A100", "A100", "V100"])
    for info, is_applied in results:
        assert is_applied
        assert info["requested"] == "auto module:2=fp32"
        assert info["effective"] == "fp16 module:2=fp32"
        assert info["reason"] == "rank 3 (Tesla V100-SXM2-16GB) has no bf16: fp16 on all ranks"


def test_ranks_with_one_kind_of_card_say_what_one_process_says(world2):
    for info, _ in world2.run(agreed, "auto", ["V100", "V100"]):
        assert info["effective"] == "fp16"
        assert info["reason"] == auto_policy(V100)[1]


def refused(policies, cards):
    rank = torch.distributed.get_rank()
    model, optimizer, kwargs = make(policy=policies[rank], hardware=CARDS[cards[rank]])
    return stopped(lambda: Stepper(model, optimizer, **kwargs))


@pytest.mark.parametrize("policy", ["bf16", "auto module:2=bf16"])
def test_a_policy_that_one_card_cannot_do_is_refused_on_all_ranks(world4, policy):
    expected = (
        f"policy {policy} on rank 3: Tesla V100-SXM2-16GB cannot compute bf16 (in tensor cores since capability 8.0, "
        "this is 7.0). Use fp16, fp32, which every rank can do, or auto."
    )
    assert world4.run(refused, [policy] * 4, ["A100", "A100", "A100", "V100"]) == [expected] * 4


def test_a_policy_that_no_card_can_do_is_refused_as_in_one_process(world2):
    texts = world2.run(refused, ["bf16"] * 2, ["V100"] * 2)
    assert texts[0] == texts[1]
    assert texts[0].startswith("policy bf16: Tesla V100-SXM2-16GB cannot compute bf16")


# --- what raises on one rank raises on all ---------------------------------------------------------------------------


def odd(default, value):
    return value if torch.distributed.get_rank() == 1 else default


def fails(case):
    """What each rank says of a call that is wrong on rank 1 alone, and how a right one after it does."""
    model, optimizer, kwargs = make(**FAILS[case][0]())
    try:
        Stepper(model, optimizer, **kwargs)
    except Exception as error:
        text = type(error).__name__, str(error)
    model, optimizer, kwargs = make()
    return text, Stepper(model, optimizer, **kwargs).step(lambda: model(torch.ones(1, 4)).square().mean()).applied


class Unusable:
    def step(self, metric):
        pass


def another_optimizer():
    """Over parameters of another model on rank 1."""
    other = torch.nn.Linear(2, 2)
    return {"optimizer": odd(torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(other.parameters(), lr=lr))}


FAILS = {
    "accumulate": (lambda: {"accumulate": odd(1, 0)}, "rank 1: accumulate=0: a window holds whole micro-batches."),
    "max_norm": (lambda: {"max_norm": odd(1.0, -1.0)}, "rank 1: max_norm=-1.0: "),
    "policy": (lambda: {"policy": odd("bf16", "bf17")}, "rank 1: compute format 'bf17': "),
    "a policy's file": (lambda: {"policy": odd("bf16", "none/here.toml")}, "rank 1: policy file none/here.toml: "),
    "module rule": (lambda: {"policy": odd("bf16", "bf16 module:gone=fp32")}, "rank 1: module rule 'gone': "),
    "optimizer": (another_optimizer, "rank 1: an optimizer with a parameter of shape (2, 2): "),
    "scheduler": (lambda: {"scheduler": odd(None, Unusable())}, "rank 1: scheduler Unusable: "),
    "contract": (lambda: {"contract": odd(halfstep_contract(), 7)}, "rank 1: contract=7: "),
    "watch": (lambda: {"watch": odd(False, "none/here.toml")}, "rank 1: "),
    "all of them": (lambda: {"accumulate": 0}, "accumulate=0: a window holds whole micro-batches."),
}


def halfstep_contract():
    from halfstep import Contract

    return Contract()


@pytest.mark.parametrize("case", FAILS)
def test_what_is_wrong_on_one_rank_raises_on_all(world2, case):
    (text, is_applied), (text_1, is_applied_1) = world2.run(fails, case)
    assert text == text_1
    assert text[0] == "HalfstepError"
    assert text[1].startswith(FAILS[case][1])
    assert is_applied
    assert is_applied_1


def breaks():
    model, optimizer, kwargs = make()
    if torch.distributed.get_rank() == 1:
        optimizer.param_groups = None  # 'NoneType' object is not iterable
    try:
        Stepper(model, optimizer, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


def test_an_error_of_another_kind_stays_what_it_is_and_is_told_to_the_others(world2):
    (kind, text), (kind_1, text_1) = world2.run(breaks)
    assert (kind, kind_1) == ("HalfstepError", "TypeError")
    assert text == (
        f"rank 1: TypeError while a Stepper was built: {text_1}. Its traceback is among what that rank has printed."
    )


def test_in_one_process_an_error_is_what_it_is():
    model, optimizer, kwargs = make(None)
    with pytest.raises(HalfstepError, match=r"^accumulate=0"):
        Stepper(model, optimizer, accumulate=0, **kwargs)
