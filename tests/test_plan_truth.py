"""The plan for this machine's processor against the live tensors of the same step on real ones: equal to the byte."""

from __future__ import annotations

import gc

import pytest
from reference.plan_workloads import LOOPS, MODELS, OPTIMIZERS, spec

from halfstep.plan.build import build
from halfstep.plan.fake_step import fake_step
from halfstep.plan.measure import live_memory
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of

pytestmark = pytest.mark.usefixtures("kernels_stay")
CPU = target_of("cpu")
MASTERS = [f"bf16 master={layout}" for layout in ("copy", "split16", "split8", "kahan", "stochastic")]
MASTERS += ["fp16 master=copy", "fp16 master=split8"]

# Not here, since they differ: an LBFGS, whose step follows values; recurrent layers in fp32 and bf16, for which a CPU
# has a kernel with a workspace of its own; and an fp16 loss that is (sum, count) with a count on the device, which is
# read for the unit of the scaled sums: 4 bytes.
CASES = [
    *[(name, policy) for name in ("mlp", "charlm") for policy in ("fp32", "bf16", "fp16")],
    ("digits", "bf16"),
    *[("fragile", policy) for policy in ("fp32", "bf16")],
    *[(spec("adamw_loop"), policy) for policy in MASTERS],
    *[(spec(name), "fp32") for name in OPTIMIZERS if name not in ("lbfgs", "sgd")],
    *[(spec(name), "bf16") for name in (*LOOPS, *MODELS)],
    *[(spec(name), "fp16") for name in ("accumulated", "conv", "language", "recurrent")],
    *[(spec(name), "bf16 master=split16") for name in ("accumulated", "language")],
]
CASES.remove((spec("recurrent"), "bf16"))


@pytest.fixture(scope="module", autouse=True)
def _collects_fast():
    """Each window begins with a garbage collection, which would go through all that torch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("workload", "policy"), CASES, ids=[f"{w.rpartition(':')[2]}-{p}" for w, p in CASES])
def test_the_planned_peak_is_the_measured_one(workload, policy):
    subject = Subject(workload)
    _, measured = live_memory(build(subject), policy, "cpu", None)
    assert measured.is_applied
    assert fake_step(subject, policy, CPU).peak.nbytes == measured.peak


@pytest.mark.parametrize("policy", ["fp32", "fp16 master=split16"])
def test_so_is_that_of_another_batch(policy):
    subject = Subject(spec("conv"), batch_size=11)
    _, measured = live_memory(build(subject), policy, "cpu", 11)
    assert fake_step(subject, policy, CPU).peak.nbytes == measured.peak
    assert fake_step(Subject(spec("conv")), policy, CPU, finds_growth=True).with_batch(11).peak.nbytes == measured.peak


def test_a_step_that_is_never_applied_says_so():
    """Fragile overflows in fp16 at any scale, so that its optimizer never makes states; a plan takes it to step."""
    subject = Subject("fragile")
    _, measured = live_memory(build(subject), "fp16 master=split8", "cpu", None)
    planned = fake_step(subject, "fp16 master=split8", CPU).peak
    assert not measured.is_applied
    assert planned.nbytes - planned.components["optimizer states"] == measured.peak
