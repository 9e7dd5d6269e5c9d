"""The classic case: its arithmetic at 7B without running it, and a small model's bytes by component."""

import pytest
from reference.stack_nets import DEPTH, NUM_PARAMETERS, traced

from halfstep.plan.classic_case import FIXED, arithmetic, largest, of_trace

pytestmark = pytest.mark.usefixtures("kernels_stay")
NUM_TENSORS = 9 * DEPTH + 3


def test_seven_billion():
    fixed, amp, foreach = arithmetic(7 * 10**9)
    assert "7 billion parameters, in FP32 with AdamW" in fixed
    assert "28 GB; gradients" in fixed
    assert "each that trains, 28 GB; two moments 8 bytes, 56 GB. That is 112 GB before activations." in fixed
    assert amp.startswith("AMP alone leaves that untouched")
    assert "28 GB" in foreach


def test_few_that_train():
    fixed, _, _ = arithmetic(7 * 10**9, 40 * 10**6)
    assert "40 million of them trained" in fixed
    assert "28 GB; gradients 4 bytes for each that trains, 0.16 GB; two moments 8 bytes, 0.32 GB" in fixed
    assert "28.5 GB before" in fixed
    assert arithmetic(999)[0].startswith("999 parameters")


def test_amp_alone_leaves_the_fixed_part_untouched():
    fp32, amp = traced("llama", "fp32", "fused"), traced("llama", "bf16", "fused")
    expected = (4 * NUM_PARAMETERS, 4 * NUM_PARAMETERS, 8 * NUM_PARAMETERS + 4 * NUM_TENSORS)
    for trace in (fp32, amp):
        assert tuple(largest(trace, name) for name in FIXED) == expected
    assert "16-bit weights" not in fp32.peak.components
    assert largest(amp, "16-bit weights") > 0


def test_lora_with_amp_leaves_mostly_activations():
    whole, adapters = traced("llama", "bf16", "fused"), traced("llama", "bf16", "lora=16", "16bit", "4bit")
    share = lambda trace: trace.peak.components["activations"] / trace.peak.nbytes  # noqa: E731
    assert share(whole) < 0.5 < share(adapters)
    text = of_trace(adapters)
    assert text.startswith("bf16 + lora=16 + 16bit + 4bit: weights ")
    assert text.endswith(f"activations are {share(adapters):.0%}.")
