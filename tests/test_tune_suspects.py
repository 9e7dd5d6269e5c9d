"""What may have to compute in fp32: the suspects of a record, their order, their rules and their share of the work."""

from types import SimpleNamespace

import pytest
import torch
from reference.nets import CPU
from reference.tune_nets import Container, Mixed, Overflowing, Vanishing, batches, source, squared_error
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.explain.suspects import (
    blamed_in,
    ends_of,
    errors_of,
    in_order,
    makers_of_nonfinite,
    producer_of,
    share_in_fp32,
    suspects_of,
    with_fp32,
    work_of,
    zeros_of,
)
from halfstep.policy import Policy
from halfstep.record import Operation, OperationRecorder, Site, Values
from halfstep.region import Region

pytestmark = pytest.mark.usefixtures("kernels_stay")
FP16 = Policy("fp16")


def record_of(model, x, policy=FP16, loss=lambda outputs: outputs.float().sum()):
    capture = Capture(model, lambda: loss(model(x)), policy, hardware=CPU)
    recorder = OperationRecorder(model)
    capture.run(under=[recorder])
    return recorder.read()


def chain(size, at=(), fault=Overflowing, seed=0):
    workload = source(size, at, fault)(seed)
    return workload.model, next(batches(seed))[0]


def names_of(model):
    return [name for name, _ in model.named_modules()]


# --- who is a suspect ----------------------------------------------------------------------------------------------


def test_suspects_are_what_meets_16_bit_in_order_of_execution():
    model = nn.Sequential(
        nn.Embedding(8, 4),  # fp32, as its table is
        nn.Linear(4, 4),
        nn.Identity(),
        nn.LayerNorm(4),  # fp32, by CUDA's lists
        nn.ReLU(),  # and so what follows it
        nn.Linear(4, 4),
        nn.GELU(),
    )
    assert suspects_of(record_of(model, torch.arange(6))) == ["1", "5", "6"]


def test_a_container_is_a_suspect_where_it_computes_between_its_parts():
    model, x = chain(2, at=(1,), fault=Container)
    assert suspects_of(record_of(model, x)) == ["0", "part0", "part1.0", "part1", "part1.1"]


def test_operations_outside_of_modules_come_last_under_names_that_rules_have():
    class Outer(nn.Sequential):
        def forward(self, x):
            return self[0](x) / 2

    record = record_of(Outer(nn.Linear(4, 4)), torch.ones(2, 4), loss=lambda outputs: (outputs * 3).mean().float())
    # mean(): of the loss function; div is what x / 2 calls, whose function is __truediv__.
    assert suspects_of(record) == ["0", "op:div", "op:mul", "op:mean"]
    for name in suspects_of(record)[1:]:
        Region(nn.Linear(4, 4), Policy("fp16", ops=((name[3:], "fp32"),)), CPU)


def test_modules_that_a_policy_keeps_in_fp32_are_no_suspects():
    model, x = chain(2)
    assert suspects_of(record_of(model, x, Policy.parse("fp16 module:part0=fp32"))) == ["0", "part1"]


# --- their order ---------------------------------------------------------------------------------------------------


def row(module, excess, passed=False, op="mm"):
    return SimpleNamespace(module=module, op=op, excess=excess, passed=passed)


def span(module, headroom=None, flushed_pct=0.0, meets=True, kind="activation"):
    loss = SimpleNamespace(headroom_bits=headroom, flushed=flushed_pct)
    return SimpleNamespace(module=module, kind=kind, meets=meets, loss=loss, histogram=SimpleNamespace(share=float))


def test_errors_are_those_that_failed_their_audit():
    rows = [row("a", 3), row("a", 7), row("b", 9, passed=True), row("c", 5, passed=None), row(None, 2, op="sum")]
    assert errors_of(rows) == {"a": 7, "op:sum": 2}


def test_ends_are_headroom_and_flushes_of_what_meets_16_bit():
    rows = [
        span("a", headroom=3.0),
        span("a", headroom=1.0, flushed_pct=25.0),
        span("b", headroom=-2.0),
        span("c", headroom=0.0, meets=False),
        span("c", headroom=0.0, kind="update"),
        span("d", headroom=10.0, flushed_pct=25.0),
    ]
    assert ends_of(rows) == {"a": 0.5, "b": 4.0, "d": 0.25}


def test_the_likeliest_first():
    names = ["a", "b", "c", "d", "e", "f"]
    errors, ends = {"d": 3.0, "e": 8.0, "c": 1.0}, {"b": 0.5, "d": 0.1, "f": 0.1, "unknown": 9.0}
    assert in_order(names, ["f", "c"], errors, ends) == ["f", "c", "e", "d", "b", "a"]
    assert in_order(names, [], {}, {}) == names


def test_makers_are_told_from_carriers():
    model, x = chain(4, at=(1, 3))
    record = record_of(model, x)
    assert makers_of_nonfinite(record) == ["part1"], "the NaN that part1 makes of its inf, and what part3 gets of it"
    assert (producer_of(record).site.module, producer_of(record).op) == ("part1", "mul")
    assert makers_of_nonfinite(record_of(model, x, Policy.parse("fp16 module:part1=fp32"))) == ["part3"]
    assert makers_of_nonfinite(record_of(*chain(4))) == []


def test_an_infinity_that_was_asked_for_has_no_maker():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(x > 0, float("-inf"))

    record = record_of(Masked(4, 4), torch.eye(4), loss=lambda outputs: outputs.float().softmax(-1)[:, 0].sum())
    assert makers_of_nonfinite(record) == []


def test_gradients_that_became_zero_are_noticed_where_it_happened():
    model, x = chain(3, at=(1,), fault=Vanishing)
    record = record_of(model, x, loss=lambda outputs: squared_error(outputs, 1.0) * 2.0**-12)
    zeros = zeros_of(record)
    assert zeros["part1"] > 0.5
    assert zeros.get("part0", 0.0) == zeros.get("part2", 0.0) == 0.0


def test_zeros_of_a_relu_are_not_suspicious():
    assert set(zeros_of(record_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(64, 4))).values()) == {0.0}


def test_blamed_operations_are_makers_then_what_failed_its_audit():
    model, x = chain(2, at=(1,), fault=Mixed)
    record = record_of(model, x)
    failed = [row("part1", 9.0, op="mm"), row("part0", 99.0, op="mul"), row("part1", 9.0, op="add", passed=True)]
    assert blamed_in(record, "part1") == ["op:addcmul"]
    assert blamed_in(record, "part1", failed) == ["op:addcmul", "op:matmul", "op:mm"]
    assert blamed_in(record, "part0", failed) == ["op:mul"]


# --- their rules ---------------------------------------------------------------------------------------------------

TREE = ["", "a", "a.0", "a.0.x", "a.0.norm", "a.1", "b[0]", "b[0].x"]


@pytest.mark.parametrize("base", ["fp16", "bf16 module:a.1=fp32", "fp16 module:a.*=bf16", "fp32 module:a=fp16"])
def test_every_module_computes_as_chosen_and_no_other_changes(base):
    base = Policy.parse(base)
    suspects = ["a", "a.0", "a.0.x", "a.1", "b[0]", "b[0].x"]
    for bits in range(2 ** len(suspects)):
        chosen = [name for i, name in enumerate(suspects) if bits >> i & 1]
        policy = with_fp32(base, TREE, chosen, suspects)
        for name in suspects:
            assert policy.format_of(name) == ("fp32" if name in chosen else base.format_of(name)), (name, chosen)
        assert Policy.parse(str(policy)) == policy


def test_rules_are_as_few_as_they_can_be():
    suspects = ["a", "a.0.x", "a.1", "op:sum"]
    assert str(with_fp32(FP16, TREE, ["a"], suspects)) == "fp16 module:a=fp32 module:a.0=fp16 module:a.1=fp16"
    assert str(with_fp32(FP16, TREE, ["a", "a.1", "a.0.x"], suspects)) == "fp16 module:a=fp32"
    assert str(with_fp32(FP16, TREE, ["op:sum", "a.1"], suspects)) == "fp16 module:a.1=fp32 op:sum=fp32"


def test_a_container_in_fp32_leaves_its_parts_in_16_bit():
    model, x = chain(1, at=(0,), fault=Container)
    policy = with_fp32(FP16, names_of(model), ["part0"], ["0", "part0", "part0.0", "part0.1"])
    formats = {}
    for operation in record_of(model, x, policy).operations:
        if operation.site.phase == "forward" and not operation.is_cast and operation.site.module:
            formats.setdefault(operation.site.module, set()).add(operation.outputs[0].format)
    assert formats == {"0": {"fp16"}, "part0.0": {"fp16"}, "part0": {"fp32"}, "part0.1": {"fp16"}}


# --- their work ----------------------------------------------------------------------------------------------------


def operation(op, inputs, output, module="m"):
    def values(shape):
        return Values("fp16", tuple(shape), None, (0,) * 261)

    return Operation(Site(module, None, "forward", None, None), op, tuple(map(values, inputs)), (values(output),))


@pytest.mark.parametrize(
    ("op", "inputs", "output", "work"),
    [
        ("mm", [(3, 5), (5, 7)], (3, 7), 3 * 5 * 7),
        ("bmm", [(2, 3, 5), (2, 5, 7)], (2, 3, 7), 2 * 3 * 5 * 7),
        ("addmm", [(7,), (3, 5), (5, 7)], (3, 7), 3 * 5 * 7),
        ("baddbmm", [(2, 3, 7), (2, 3, 5), (2, 5, 7)], (2, 3, 7), 2 * 3 * 5 * 7),
        ("convolution", [(1, 4, 9, 9), (6, 4, 3, 3), (6,)], (1, 6, 7, 7), 6 * 49 * 4 * 9),
        ("_scaled_dot_product_flash_attention_for_cpu", [(1, 2, 5, 8), (1, 2, 6, 8)], (1, 2, 5, 8), 2 * 5 * 8 * 6 * 2),
        ("gelu", [(3, 5)], (3, 5), 15),
        ("sum", [(3, 5)], (), 15),
    ],
)
def test_work_is_multiply_adds_or_values(op, inputs, output, work):
    assert work_of(operation(op, inputs, output)) == work


def test_share_counts_modules_and_operations_once():
    record = SimpleNamespace(
        operations=[
            operation("mm", [(4, 4), (4, 4)], (4, 4), "a"),  # 64
            operation("mul", [(4, 4)], (4, 4), "a"),  # 16
            operation("mul", [(4, 4)], (4, 4), "b"),  # 16
        ]
    )
    assert share_in_fp32(record, ["a"]) == 80 / 96
    assert share_in_fp32(record, ["op:mul"]) == 32 / 96
    assert share_in_fp32(record, ["a", "op:mul"]) == 1
    assert share_in_fp32(record, []) == 0
