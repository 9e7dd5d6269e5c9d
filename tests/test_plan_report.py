"""The report of a plan: its sentence, its tables, its JSON, from steps that are made by hand."""

import json
from dataclasses import replace

import pytest

from halfstep.plan.plan_report import PlanReport
from halfstep.plan.policy_plan import Outside, PolicyPlan
from halfstep.plan.sharding import ShardedPeak
from halfstep.plan.size import GIB, MIB, size_text
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP, StepTrace, Storage
from halfstep.plan.target import target_of


def storage(nbytes, component, born, died, phase=FORWARD, op="aten.mm.default", module="block"):
    made = (phase, op, module, "net.py", 7) if born else (None,) * 5
    return Storage(nbytes, component, *made, born, died)


def step(policy, activations):
    """Weights of 4 MiB all the time, activations in the forward pass, a gradient of 4 MiB beside half of them."""
    return StepTrace(
        storages=(
            storage(4 * MIB, "weights", 0, None),
            storage(activations, "activations", 1, 4),
            storage(activations, "activations", 2, 5),
            storage(4 * MIB, "gradients", 3, 6, BACKWARD, "aten.addmm.default", "head"),
        ),
        num_events=6,
        phases=((FORWARD, 1), (BACKWARD, 3), (STEP, 6)),
        batch_size=8,
        num_samples=16,
        num_parameters=2**20,
        num_trained=2**19,
        policy=policy,
        attention={"flash: bf16": ["block"]} if policy == "bf16" else None,
    )


def plan_of(policy, activations, capacity=None, **more):
    outside = (Outside("CUDA context", 100 * MIB, "assumed: a test"),)
    return PolicyPlan(policy, step(policy, activations), 64 * MIB, outside, 164 * MIB, capacity, **more)


REFUSED = PolicyPlan("fp16", refused="policy fp16: the card cannot compute it. Use bf16.")


def report(*plans, memory=None):
    return PlanReport("net.py:workload", target_of(memory_gib=memory), "2.13.0", plans, assumptions=("Exact: a test.",))


def test_a_plan_adds_up():
    plan = plan_of("bf16", 10 * MIB)
    assert plan.peak == (4 + 10 + 10 + 4) * MIB
    assert plan.maker.op == "aten.addmm.default"
    assert PolicyPlan("bf16", step("bf16", 10 * MIB)).fits is None


@pytest.mark.parametrize(("capacity", "fits"), [(164 * MIB, True), (164 * MIB - 1, False)])
def test_it_fits_to_the_byte(capacity, fits):
    assert plan_of("bf16", 10 * MIB, capacity).fits is fits


def test_headline_compares_with_the_first_policy_that_runs():
    two = report(plan_of("fp32", 20 * MIB), plan_of("bf16", 10 * MIB), REFUSED)
    assert two.headline == "net.py:workload on a CUDA card: fp32 peaks at 48 MiB, bf16 28 MiB (-42 %)."
    first_refused = report(REFUSED, plan_of("bf16", 10 * MIB))
    assert first_refused.headline == "net.py:workload on a CUDA card: bf16 peaks at 28 MiB."
    assert "cannot run" in str(first_refused)
    assert "fp16: policy fp16: the card cannot compute it. Use bf16." in str(first_refused)


@pytest.mark.parametrize(
    ("capacities", "found", "clause"),
    [
        ((200, 200), False, "; each fits into 1 GiB."),
        ((100, 100), True, "; none fits into 1 GiB."),
        ((100, 200), False, "; of them bf16 fit into 1 GiB."),
        ((None, None), False, "(-42 %)."),
    ],
)
def test_found_is_that_nothing_fits(capacities, found, clause):
    capacities = [None if each is None else each * MIB for each in capacities]
    plans = [plan_of(p, n * MIB, c) for p, n, c in zip(("fp32", "bf16"), (20, 10), capacities, strict=True)]
    made = report(*plans, memory=None if capacities[0] is None else 1.0)
    assert made.found is found
    assert made.headline.endswith(clause)


def test_json_has_the_keys_that_others_rely_on():
    made = report(plan_of("fp32", 20 * MIB, largest_batch=3), REFUSED, memory=1.0).to_dict()
    text = json.dumps(made, allow_nan=False)
    assert json.loads(text) == made
    assert made.keys() >= {"workload", "card", "torch", "parameters", "policies", "stacks", "assumptions", "advice"}
    first, refused = made["policies"]
    assert first == {
        "policy": "fp32",
        "effective": "fp32",
        "peak_mib": 48.0,
        "reserved_mib": 64.0,
        "outside_mib": 100.0,
        "outside": [{"name": "CUDA context", "mib": 100.0, "how": "assumed: a test"}],
        "phase": BACKWARD,
        "op": "aten.addmm.default",
        "module": "head",
        "components": {"weights": 4.0, "gradients": 4.0, "activations": 40.0},
        "attention": {},
        "fits": None,
        "largest_batch": 3,
        "saves_from": None,
        "samples_per_s_bound": None,
        "bound": None,
        "refused": None,
    }
    assert refused.keys() == first.keys()
    assert refused["refused"].startswith("policy fp16")
    assert refused["peak_mib"] is None


def test_text_has_everything():
    text = str(
        report(
            plan_of("fp32", 20 * MIB, GIB, largest_batch=1234), plan_of("bf16", 10 * MIB, GIB, saves_from=5), memory=1.0
        )
    )
    for part in ("1,048,576 parameters, 524,288 of them trained", "a batch of 8, 2 of them a step", "1,234", "-42 %"):
        assert part in text, part
    assert "flash: bf16" in text
    assert "backward pass, aten.addmm in head" in text
    assert text.rstrip().endswith("Exact: a test.")


def test_ranks_have_their_table_and_their_rows():
    peak = ShardedPeak(8, 3, 6 * MIB, {"weights": MIB, "activations": 5 * MIB}, BACKWARD, "derived: a test")
    made = replace(report(plan_of("bf16", 10 * MIB)), sharded=(("bf16", peak), ("fp16", "fp16: it cannot.")))
    text = str(made)
    assert "A rank of 8, each with the whole micro-batch" in text
    assert "ZeRO 3, FSDP2" in text
    assert "activations 5 MiB, weights 1 MiB" in text
    assert "fp16: it cannot." in text
    first, refused = made.to_dict()["sharded"]
    assert (first["policy"], first["num_ranks"], first["stage"], first["peak_mib"]) == ("bf16", 8, 3, 6.0)
    assert refused == {"policy": "fp16", "refused": "fp16: it cannot."}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (1536, "1.5 KiB"),
        (MIB, "1 MiB"),
        (9.73 * MIB, "9.73 MiB"),
        (1023 * MIB, "1,023 MiB"),
        (GIB, "1 GiB"),
        (125.51 * GIB, "126 GiB"),
        (-23.2 * GIB, "-23.2 GiB"),
        (2000 * GIB, "2,000 GiB"),
    ],
)
def test_sizes_have_three_digits(nbytes, text):
    assert size_text(nbytes) == text
