"""The rule that chooses a kernel of attention, against cases worked out by hand from torch's source."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.plan.attention import CUDNN, EFFICIENT, FLASH, KERNELS, MATH, AttentionCall, choose

B, H, T, D = 2, 4, 32, 64


def call(format="bf16", size=D, heads=H, key_heads=H, tokens=T, key_tokens=T, **more):
    key = (B, key_heads, key_tokens, size)
    return AttentionCall(format, (B, heads, tokens, size), key, more.pop("value", key), **more)


@pytest.mark.parametrize(
    ("capability", "format", "kernel"),
    [
        ((6, 1), "fp32", EFFICIENT), ((6, 1), "fp16", EFFICIENT), ((6, 1), "bf16", MATH), ((6, 1), "fp64", MATH),
        ((7, 5), "fp32", EFFICIENT), ((7, 5), "fp16", EFFICIENT), ((7, 5), "bf16", MATH),
        ((8, 0), "fp32", EFFICIENT), ((8, 0), "fp16", FLASH), ((8, 0), "bf16", FLASH), ((8, 0), "fp64", MATH),
        ((8, 9), "bf16", FLASH), ((9, 0), "bf16", CUDNN), ((9, 0), "fp32", EFFICIENT), ((10, 0), "fp16", CUDNN),
        ((12, 0), "bf16", FLASH), ((12, 1), "fp32", EFFICIENT), ((13, 0), "bf16", MATH),
    ],
)  # fmt: skip
def test_each_generation_takes_its_kernel(capability, format, kernel):
    assert choose(call(format), capability).kernel == kernel


@pytest.mark.parametrize(
    ("more", "kernel"),
    [
        ({"mask": (T, T)}, EFFICIENT),
        ({"mask": (T, T), "size": 60}, MATH),
        ({"dropout": 0.1}, FLASH),
        ({"size": 256}, FLASH),
        ({"size": 264}, EFFICIENT),
        ({"size": 60}, FLASH),
        ({"size": 60, "format": "fp32"}, EFFICIENT),
        ({"size": 62, "format": "fp32"}, MATH),
        ({"is_causal": True}, FLASH),
        ({"is_causal": True, "key_tokens": 40}, EFFICIENT),
        ({"heads": 8, "enable_gqa": True}, FLASH),
        ({"heads": 8, "enable_gqa": True, "mask": (T, T)}, MATH),
        ({"heads": 8}, MATH),
        ({"heads": 6, "enable_gqa": True}, MATH),
        ({"value": (B, H, T, 32)}, EFFICIENT),
        ({"value": (B, H, T, 36)}, MATH),
        ({"value": (1, H, T, D)}, MATH),
        ({"tokens": 0}, MATH),
        ({"is_dense": False}, MATH),
    ],
)
def test_on_ampere_what_is_asked_decides(more, kernel):
    assert choose(call(**more), (8, 0)).kernel == kernel


@pytest.mark.parametrize(
    ("more", "kernel"),
    [
        ({}, CUDNN),
        ({"dropout": 0.125}, CUDNN),
        ({"dropout": 0.1}, FLASH),
        ({"size": 136}, FLASH),
        ({"size": 60}, FLASH),
        ({"size": 192, "value": (B, H, T, 128)}, CUDNN),
        ({"mask": (B, 1, T, T)}, CUDNN),
        ({"mask": (T, T), "mask_needs_grad": True}, EFFICIENT),
        ({"mask": (B, T, T)}, EFFICIENT),
        ({"mask": (B, 3, T, T)}, EFFICIENT),
        ({"heads": 8, "enable_gqa": True}, CUDNN),
        ({"key_tokens": 1}, FLASH),
        ({"tokens": 1}, CUDNN),
        ({"tokens": 1, "dropout": 0.5}, FLASH),
    ],
)
def test_on_hopper_cudnn_comes_first(more, kernel):
    choice = choose(call(**more), (9, 0))
    assert choice.kernel == kernel
    assert (choice.assumed is not None) == (kernel == CUDNN)


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
def test_cards_with_less_shared_memory_do_not_train_every_head_size_in_flash(capability):
    def kernel(size, **more):
        return choose(call(size=size, **more), capability).kernel

    assert [kernel(size) for size in (192, 200, 224, 232, 256)] == [FLASH, EFFICIENT, EFFICIENT, FLASH, FLASH]
    assert kernel(256, dropout=0.1) == EFFICIENT
    assert kernel(224, needs_grad=False) == FLASH
    assert choose(call(size=224), (8, 0)).kernel == FLASH


def test_below_turing_fp32_and_fp16_have_no_alignment():
    assert choose(call("fp32", size=61), (7, 5)).kernel == EFFICIENT
    assert choose(call("fp16", size=61), (7, 5)).kernel == MATH
    assert choose(call("fp16", size=61), (6, 1)).kernel == EFFICIENT


def test_the_reason_names_each_kernel_that_refused():
    choice = choose(call("bf16"), (7, 5))
    assert str(choice) == ("math (bf16 on capability 7.5: flash needs 8.0, memory-efficient has no bf16 below 8.0)")
    assert str(choose(call("fp16"), (8, 0))) == "flash (fp16 on capability 8.0: it takes head size 64)"


def test_of_an_amd_card_it_says_what_is_assumed():
    choice = choose(call("bf16"), None)
    assert choice.kernel == FLASH
    assert "AOTriton" in choice.assumed
    assert "an AMD card" in choice.reason
    assert choose(call("fp32"), None).assumed
    assert choose(call("fp64"), None).assumed is None  # math is there on any card


def test_a_kernel_that_is_switched_off_is_passed_over():
    assert choose(call(), (8, 0), {EFFICIENT, MATH}).kernel == EFFICIENT
    choice = choose(call(), (8, 0), {MATH})
    assert choice.kernel == MATH
    assert "flash is switched off" in choice.reason


def test_without_math_a_call_that_nobody_takes_is_an_error():
    with pytest.raises(HalfstepError, match="flash takes no mask, memory-efficient is switched off"):
        choose(call(mask=(T, T)), (8, 0), {FLASH})


def test_math_takes_what_is_left_and_only_that():
    """Over many calls: a kernel is chosen exactly if it is the first of the order that takes the call alone."""
    for format, size, mask, causal, dropout, capability in itertools.product(
        ("fp32", "fp16", "bf16"),
        (60, 64, 200, 512),
        (None, (T, T)),
        (False, True),
        (0.0, 0.25),
        ((7, 0), (8, 6), (9, 0)),
    ):
        made = call(format, size, mask=mask, is_causal=causal, dropout=dropout)
        order = KERNELS if capability == (9, 0) else KERNELS[1:]
        alone = []
        for kernel in order:
            try:
                alone.append(choose(made, capability, {kernel}).kernel)
            except HalfstepError:
                continue
        assert choose(made, capability).kernel == alone[0]
        assert alone[-1] == MATH


def test_the_rule_needs_no_torch():
    script = "import sys, halfstep.plan.attention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.gpu
def test_a_real_card_chooses_the_same():
    """Where there is one: torch's own choice, with cuDNN as new as the rule assumes."""
    codes = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
    capability = torch.cuda.get_device_capability()
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for format, size, mask, causal, dropout, heads in itertools.product(
        dtypes, (60, 64, 128, 200, 256, 264), (None, (T, T)), (False, True), (0.0, 0.1, 0.25), (H, 2 * H)
    ):
        if mask and causal:
            continue
        made = call(format, size, heads=heads, mask=mask, is_causal=causal, dropout=dropout, enable_gqa=heads != H)
        query, key, value = (
            torch.zeros(shape, device="cuda", dtype=dtypes[format], requires_grad=True)
            for shape in (made.query, made.key, made.value)
        )
        bias = None if mask is None else torch.zeros(mask, device="cuda", dtype=dtypes[format])
        found = torch._fused_sdp_choice(query, key, value, bias, dropout, causal, enable_gqa=made.enable_gqa)
        assert codes[found] == choose(made, capability).kernel, dataclasses.asdict(made)
