"""Audit of whole steps: healthy nets have no operation that fails, in either format, and leave nothing behind."""

import pytest
import torch
from reference.audit_nets import NETS
from torch import nn

from halfstep.explain.audit import audit, audit_of
from halfstep.explain.rehearsal import capture_at
from halfstep.policy import Policy
from halfstep.source import Source, load
from halfstep.workload import Workload

pytestmark = pytest.mark.usefixtures("kernels_stay")


def source_of(name):
    net, batch, loss = NETS[name]

    def build(seed):
        model, generator = net(), torch.Generator().manual_seed(seed)
        return Workload(
            model, iter(lambda: batch(generator), None), loss, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
        )

    return Source(name, build)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", [*NETS, "mlp", "digits"])
def test_a_healthy_net_has_no_fault(name, policy):
    source = source_of(name) if name in NETS else load(name)
    report = audit(source, Policy.parse(policy), 3)
    assert report.failed == ()
    assert report.how == "step 3"
    assert not report.found
    assert {op.passed for op in report.ops} == {True}
    assert {"forward", "backward"} == {op.phase for op in report.ops}


def test_a_transformer_has_no_fault():
    assert audit(load("charlm"), Policy.parse("fp16"), 2).failed == ()


def test_the_same_step_reads_the_same_and_leaves_nothing_behind():
    capture, how = capture_at(source_of("conv"), Policy.parse("bf16"), 2)
    before = {name: value.clone() for name, value in capture.model.state_dict().items()}
    first, second = audit_of(capture, how), audit_of(capture, how)
    assert first.to_dict() == second.to_dict()
    for name, value in capture.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_batch_statistics_are_right_by_themselves():
    report = audit(source_of("conv"), Policy.parse("bf16"), 2)
    norms = [op for op in report.ops if op.op == "native_batch_norm"]
    assert norms
    assert all(op.error < 2 for op in norms)
    assert {op.module for op in norms} == {"norm", "norm1"}


def test_a_fragile_module_is_named():
    report = audit(load("fragile"), Policy.parse("fp16"), 1)
    first = report.failed[0]
    assert (first.module, first.kind, first.phase) == ("pool", "overflow", "forward")
    assert first.op in ("bmm", "mm")
    assert ("keep pool in fp32", "mends it") in [(a.text, a.result) for a in report.advice]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", [*NETS, "digits", "charlm"])
def test_a_healthy_net_has_no_fault_on_cuda(name, policy):
    source = source_of(name) if name in NETS else load(name)
    assert audit(source, Policy.parse(policy), 3, device="cuda").failed == ()


@pytest.mark.gpu
def test_fused_attention_is_held_against_its_formula_on_cuda():
    from halfstep.explain.audit import audit_loss

    q = torch.randn(2, 4, 64, 32, device="cuda")
    for causal in (False, True):
        report = audit_loss(
            lambda q, c=causal: nn.functional.scaled_dot_product_attention(q, q * 0.5, q.flip(2), is_causal=c).sum(),
            q,
            policy="bf16",
            device="cuda",
        )
        rows = [op for op in report.ops if "attention" in op.op]
        assert {op.phase for op in rows} == {"forward", "backward"}
        assert all(op.passed for op in rows)
