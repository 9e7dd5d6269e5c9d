"""The search: what is tried, what each needs, which is the cheapest that fits; and the real thing once."""

from dataclasses import replace

import pytest
from reference.stack_nets import BATCH, llama, spec, traced
from reference.step_traces import growing

from halfstep.errors import HalfstepError
from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.prices import ordered, price_key
from halfstep.plan.stacks import COMBINATIONS, Stack, answer, cheapest, larger_batch, stacks_of, stacks_table
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of

pytestmark = pytest.mark.usefixtures("kernels_stay")
MIB = 2**20


def tensors(trace):
    return trace.peak.nbytes


class Answering:
    """Answers calls of fake_step from ``traces``: names to a function of (batch size) to a trace or an error."""

    def __init__(self, traces):
        self.traces, self.asked = traces, []

    def run(self, calls):
        for call in calls:
            assert call.function == "halfstep.plan.fake_step:fake_step"
            assert call.kwargs == {"finds_growth": True}
        self.asked += [(call.args[3], call.args[0].batch_size, call.args[1]) for call in calls]
        return [self.traces[call.args[3]](call.args[0].batch_size) for call in calls]


class InProcess:
    def run(self, calls):
        return [call() for call in calls]


def plan_of(policy, trace):
    return PolicyPlan(policy, trace, need=trace.peak.nbytes, capacity=0)


def search(traces, combinations, capacity, batch_size=4, plans=None):
    workers = Answering(traces)
    plans = plans or [plan_of("bf16", growing(100, 10, batch_size))]
    stacks = stacks_of(workers, Subject("w"), target_of(None, 1), plans, tensors, capacity, combinations)
    return stacks, workers.asked


def test_every_combination_goes_together_and_each_technique_is_tried_alone():
    for names in COMBINATIONS:
        assert len(ordered(names)) == len(names)
    assert len(set(map(frozenset, COMBINATIONS))) == len(COMBINATIONS)
    alone = {names[0] for names in COMBINATIONS if len(names) == 1}
    used = {name for names in COMBINATIONS for name in names}
    assert used - alone == {"16bit", "4bit", "uncached"}  # what is no use alone


def test_the_best_is_the_first_16_bit_policy():
    plans = [
        plan_of("fp32", growing(10, 1, policy="fp32")),
        plan_of("fp16", growing(200, 10, policy="fp16")),
        plan_of("bf16", growing(100, 10)),
        PolicyPlan("tf32", refused="no"),
    ]
    stacks, asked = search({("fused",): lambda size: growing(90, 10, size)}, [("fused",)], 1000, plans=plans)
    assert [(stack.policy, stack.names) for stack in stacks] == [
        ("fp32", ()),
        ("fp16", ()),
        ("bf16", ()),
        ("fp16", ("fused",)),
    ]
    assert asked == [(("fused",), 4, "fp16")]
    _, asked = search({("fused",): lambda size: growing(9, 1, size)}, [("fused",)], 1000, plans=plans[:1])
    assert asked == [(("fused",), 4, "fp32")]


def test_a_stack_tells_need_fit_and_the_largest_batch():
    combinations = [("checkpointing",), ("fused",), ("split16",)]
    traces = {
        ("fused",): lambda size: growing(100, 10, size),
        ("checkpointing",): lambda size: growing(100, 5, size),
        ("split16",): lambda size: HalfstepError("split16", "it cannot", "Leave it"),
    }
    (base, *stacks), _ = search(traces, combinations, 130)
    assert base.need == 140
    assert [(s.names, s.need, s.fits, s.largest_batch) for s in stacks] == [
        (("fused",), 140, False, 3),
        (("checkpointing",), 120, True, 6),
        (("split16",), None, None, None),
    ]
    assert stacks[2].refused == "split16: it cannot. Leave it"
    assert cheapest(stacks) is stacks[1]
    assert cheapest(stacks[:1]) is None
    assert stacks[1].to_dict() == {
        "names": ["checkpointing"],
        "policy": "bf16",
        "batch_size": 4,
        "peak_mib": 120 / MIB,
        "need_mib": 120 / MIB,
        "components": {"weights": 100 / MIB, "activations": 20 / MIB},
        "fits": True,
        "largest_batch": 6,
        "price": list(stacks[1].price),
        "refused": None,
    }
    refused = stacks[2].to_dict()
    assert (refused["fits"], refused["peak_mib"], refused["components"]) == (None, None, {})


@pytest.mark.parametrize(
    ("batch_size", "capacity", "num", "size", "need"),
    [
        (8, 1000, 2, 4, 140),  # half of it fits
        (8, 130, 4, 2, 120),  # 3 samples would, 2 divide it
        (8, 50, 8, 1, 110),  # none fits: the least
        (9, 1000, 3, 3, 130),
        (7, 1000, 7, 1, 110),
    ],
)
def test_accumulation_takes_the_fewest_equal_parts_that_fit(batch_size, capacity, num, size, need):
    names = ("accumulate=2",)
    traces = {names: lambda half: growing(100, 10, half, 2 * half, techniques=names)}
    (_, stack), asked = search(traces, [names], capacity, batch_size)
    assert asked == [(names, -(-batch_size // 2), "bf16")]
    assert stack.names == stack.trace.techniques == (f"accumulate={num}",)
    assert (stack.batch_size, stack.need, stack.trace.num_samples) == (size, need, batch_size)
    assert stack.price[0].startswith(f"accumulate={num}: time")


def test_a_single_sample_cannot_be_divided():
    stacks, asked = search({}, [("accumulate=2",)], 1000, 1)
    assert (len(stacks), asked) == (1, [])


def test_a_single_sample_that_runs_in_another_way_takes_its_growth_from_two():
    names = ("fused",)
    traces = {names: lambda size: replace(growing(80, 10, size, grows=False), pair=growing(100, 10, 2))}
    (_, stack), asked = search(traces, [names], 150, 1)
    assert [size for _, size, _ in asked] == [1]
    assert (stack.need, stack.largest_batch) == (90, 5)


def test_a_growth_that_is_not_known_is_not_guessed():
    traces = {
        ("fused",): lambda size: growing(100, 10, size, grows=False),
        ("accumulate=2",): lambda size: growing(100, 10, size, 2 * size, grows=False),
    }
    (_, fused, parts), _ = search(traces, [("fused",), ("accumulate=2",)], 1000)
    assert (fused.need, fused.largest_batch) == (140, None)
    assert parts.refused.startswith("accumulate=2: smaller micro-batches run in another way")


def stack(names, need, capacity=100 * MIB, largest=4, batch_size=4):
    trace = growing(need, 0, batch_size)
    return Stack(names, "bf16", capacity, batch_size, trace, need, largest)


def test_the_answer_names_the_cheapest_or_what_is_missing():
    stacks = [stack((), 300 * MIB), stack(("fused",), 90 * MIB), stack(("checkpointing",), 50 * MIB)]
    assert answer(stacks) == (
        "The cheapest stack that fits a step of 4 samples into 100 MiB is bf16 + fused: it needs 90 MiB."
    )
    assert answer([stacks[0], stack(("fused",), 120 * MIB)]) == (
        "No stack fits a step of 4 samples into 100 MiB: bf16 + fused comes nearest, needs 120 MiB, "
        "and 20 MiB are missing."
    )


def test_what_a_larger_batch_does_to_the_learning_rate():
    assert larger_batch([stack((), 50 * MIB, largest=7)], "train.py:make") == ()
    assert larger_batch([stack((), 500 * MIB, largest=0)], "train.py:make") == ()
    fits, rules, test = larger_batch([stack(("fused",), 50 * MIB, largest=37)], "train.py:make")
    assert fits == "bf16 + fused admits micro-batches of up to 37 samples, 8 x 4 = 32 in powers of two."
    assert "by 8 with SGD (linear, Goyal et al. 2017" in rules
    assert "by 2.83 with Adam (square root, Malladi et al. 2022" in rules
    assert "halfstep compare train.py:larger --policies fp32,bf16, with 1/8 of the steps" in test
    for asked, this in (("charlm", "charlm"), ("transformers:GPT2Model", "FILE.py:workload")):
        test = larger_batch([stack((), 50 * MIB, largest=8)], asked)[2]
        assert "halfstep compare FILE.py:larger" in test
        assert f"of halfstep compare {this} --policies" in test


def test_a_table_shows_what_each_costs():
    refused = Stack(("4bit",), "bf16", 1, refused="4bit: no. Leave it")
    priced = Stack(("split8",), "bf16", 100, 4, growing(50, 0), 50, None, ("split8: accuracy: some; time: more",))
    table = stacks_table([stack((), 300 * MIB), priced, refused])
    assert [str(cell) for cell in table.rows[0]] == ["bf16", "300 MiB", "300 MiB", "no", "4", "-"]
    assert [str(cell) for cell in table.rows[1]][3:] == ["yes", "-", "time, accuracy"]
    assert [str(cell) for cell in table.rows[2]] == ["bf16 + 4bit", "cannot run", "", "", "", "4bit: no. Leave it"]


@pytest.mark.slow
def test_a_real_search():
    plans = [plan_of("bf16", traced("llama", "bf16", batch_size=BATCH))]
    subject, target = Subject(spec("llama"), BATCH), target_of(None, 1)
    combinations = [("fused",), ("accumulate=2", "fused"), ("adamw8bit",)]
    stacks = stacks_of(InProcess(), subject, target, plans, tensors, 1, combinations)
    assert [price_key(each.names) for each in stacks] == sorted(price_key(each.names) for each in stacks)
    by_names = {each.names: each for each in stacks}
    assert by_names["fused",].trace.peak == traced("llama", "bf16", "fused").peak
    assert by_names["adamw8bit",].need < by_names["fused",].need
    assert answer(stacks).startswith("No stack fits a step of 4 samples")
    # A window of 4 was derived from one of 2; here it runs.
    (derived,) = (each for each in stacks if "accumulate=4" in each.names)
    real = traced("llama", "bf16", "fused", "accumulate=4", batch_size=1)
    assert derived.batch_size == 1
    assert (derived.trace.peak.nbytes, derived.trace.num_samples) == (real.peak.nbytes, BATCH)
    assert llama(0).accumulate == 1
