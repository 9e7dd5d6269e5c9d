"""What stands for CUDA's operations: the same results, and the memory that CUDA's source allocates and keeps."""

import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.compare.memory import LiveBytes
from halfstep.plan.attention import CUDNN, EFFICIENT, FLASH, MATH
from halfstep.plan.attention_kernels import RUN
from halfstep.plan.cuda_ops import RECURRENT_NOTE, CudaOps
from halfstep.plan.statistics import NORMS, in_fp32
from halfstep.plan.target import target_of

aten = torch.ops.aten
B, H, T, D = 2, 3, 96, 64
ROWS, ELEMENTS, SCORES = B * H * T, B * H * T * D, B * H * T * T


def inputs(dtype=torch.float64, heads=H, key_heads=H, tokens=T, size=D):
    drawn = torch.Generator().manual_seed(0)
    shapes = (B, heads, tokens, size), (B, key_heads, tokens, size), (B, key_heads, tokens, size)
    return [torch.randn(s, generator=drawn, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def run(kernel, tensors, mask=None, dropout=0.0, is_causal=False, scale=None, enable_gqa=False):
    return RUN[kernel](*tensors, mask, dropout, is_causal, scale, enable_gqa)


def gradients(out, tensors):
    return torch.autograd.grad(out, tensors, torch.ones_like(out))


class Kept:
    """Bytes of the storages that autograd saves meanwhile, those of ``without`` aside."""

    def __init__(self, *without):
        self._without = {t.untyped_storage()._cdata for t in without}
        self._sizes = {}

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)

    def _save(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._without:
            self._sizes[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def nbytes(self):
        return sum(self._sizes.values())


# --- math: a twin of the C++ form ----------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "float mask": {"mask": torch.linspace(-1, 1, T * T, dtype=torch.float64).view(T, T)},
    "bool mask": {"mask": torch.arange(T * T).view(T, T) % 3 > 0},
    "masked rows": {"mask": (torch.arange(T) > 5)[:, None].expand(T, T)},
}


@pytest.mark.parametrize("case", CASES)
def test_math_is_torchs_math(case):
    """In fp64 to 1e-12: the order of sums may differ, and nothing else."""
    more = CASES[case]
    tensors = inputs()
    out = run(MATH, tensors, **more)
    with sdpa_kernel(SDPBackend.MATH):
        named = {"attn_mask" if name == "mask" else name: value for name, value in more.items()}
        expected = F.scaled_dot_product_attention(*tensors, **named)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, right in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_math_repeats_grouped_heads():
    tensors = inputs(heads=6, key_heads=2)
    out = run(MATH, tensors, enable_gqa=True)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["dense", "heads inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_math_keeps_what_the_c_form_keeps(dtype, layout):
    """torch's own math form serves the CPU and CUDA alike: the same bytes are alive after forward, to the byte."""
    tensors = inputs(dtype)
    if layout == "heads inside":  # as a view of [batch, tokens, heads, size]
        tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors]
    alive = []
    for form in (lambda: run(MATH, tensors), lambda: F.scaled_dot_product_attention(*tensors)):
        live = LiveBytes()
        live.count(tensors)
        before = live.now
        with live, sdpa_kernel(SDPBackend.MATH):
            out = form()
        alive.append(live.now)
        del out
        assert live.now == before
    assert alive[0] == alive[1]


def test_math_in_16_bits_with_dropout_keeps_9_bytes_a_score():
    """Weights 4, dropped weights 4, mask 1; and query, key and value in fp32."""
    tensors = inputs(torch.bfloat16)
    with CudaOps(target_of("T4")), Kept(*tensors) as kept:
        run(MATH, tensors, dropout=0.1)
    assert kept.nbytes == 9 * SCORES + 3 * 4 * ELEMENTS


def test_math_adds_a_mask_in_place():
    tensors, mask = inputs(torch.float32), torch.zeros(T, T)
    with Operations() as operations:
        run(MATH, tensors, mask)
    assert aten.add_.Tensor in operations.seen
    assert aten.add.Tensor not in operations.seen


def test_math_casts_its_inputs_and_both_of_its_results():
    tensors = inputs(torch.bfloat16)
    with Operations() as operations:
        run(MATH, tensors)
    assert operations.seen[aten._to_copy.default] == 5  # the weights, which nobody asked for, as well


# --- fused kernels: closed forms -----------------------------------------------------------------------------------


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, CUDNN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fused_kernels_keep_output_and_one_number_a_row(fake, kernel, dtype):
    if kernel != EFFICIENT and dtype is torch.float32:
        pytest.skip("it has no fp32")
    tensors = inputs(dtype)
    with Kept(*tensors) as kept:
        out = run(kernel, tensors, dropout=0.1)
    random_state = kept.nbytes - out.element_size() * ELEMENTS - 4 * ROWS
    assert 0 <= random_state <= 24  # a seed and an offset


def test_rows_of_memory_efficient_are_padded_to_32(fake):
    tensors = inputs(torch.float16, tokens=100)
    with Kept(*tensors) as kept:
        run(EFFICIENT, tensors)
    assert kept.nbytes == B * H * (2 * 100 * D + 4 * 128) + 16


def backward_peak(kernel, tensors, **more):
    """Most bytes in a backward pass above what it begins with."""
    out = run(kernel, tensors, **more)
    grad = torch.ones_like(out)
    live = LiveBytes()
    live.count([*tensors, out, grad])
    before = live.now
    with live:
        torch.autograd.grad(out, tensors, grad)
    return live.peak - before


def test_the_backward_pass_of_flash_sums_the_querys_gradient_in_fp32(fake):
    rows, size = 128, 64  # 40 tokens rounded up to 128, and the head size to 32
    tensors = inputs(torch.bfloat16, tokens=40, size=56)
    assert backward_peak(FLASH, tensors) == 3 * 2 * B * H * 40 * 56 + 4 * B * H * rows * (size + 1)


def test_grouped_heads_in_flash_have_gradients_of_their_own(fake):
    tensors = inputs(torch.bfloat16, heads=6, key_heads=2)
    sums = 4 * B * 6 * 128 * (D + 1)
    grouped = 2 * 2 * B * T * D * (6 + 2)  # of key and value: for each head of the query, then summed
    assert backward_peak(FLASH, tensors) == 2 * B * 6 * T * D + sums + grouped


def test_the_backward_pass_of_memory_efficient_does_so_in_16_bits_only(fake):
    tiles = 128  # rounded up to 64
    half, full = inputs(torch.float16), inputs(torch.float32)
    assert backward_peak(EFFICIENT, half) == 3 * 2 * ELEMENTS + 4 * ROWS + 4 * B * H * tiles * D
    assert backward_peak(EFFICIENT, full) == 3 * 4 * ELEMENTS + 4 * ROWS


def test_flash_pads_head_sizes_to_8(fake):
    tensors = inputs(torch.float16, size=60)
    with Kept() as kept:
        out = run(FLASH, tensors)
    assert out.shape == (B, H, T, 60)
    assert kept.nbytes == 4 * 2 * B * H * T * 64 + 4 * ROWS + 24


@pytest.mark.parametrize("length", [96, 100])
def test_a_mask_of_memory_efficient_is_aligned_and_spread(fake, length):
    """A bool mask becomes one that is added, with rows that are padded to 8, and is never copied for each head."""
    query = torch.zeros(B, H, T, D, dtype=torch.float16, requires_grad=True)
    key = torch.zeros(B, H, length, D, dtype=torch.float16)
    with Kept(query, key) as kept:
        out = run(EFFICIENT, [query, key, key], torch.ones(T, length, dtype=torch.bool))
    padded = length if length % 8 == 0 else length + 8 - length % 8
    assert kept.nbytes == 2 * T * padded + 2 * ELEMENTS + 4 * ROWS + 16
    torch.autograd.grad(out, query, torch.ones_like(out))


# --- on a device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "kernel", "op"),
    [
        ("T4", "math", aten.bmm.default),
        ("A100 SXM4 80GB", "flash", aten._scaled_dot_product_flash_attention.default),
        ("H100 SXM5", "cuDNN", aten._scaled_dot_product_cudnn_attention.default),
    ],
)
def test_a_call_runs_the_kernel_of_the_card_and_is_noted(fake, card, kernel, op):
    with CudaOps(target_of(card)) as cuda_ops, Operations() as operations:
        for name in ("first", "first", None, "second"):
            cuda_ops.module_now = lambda name=name: name
            F.scaled_dot_product_attention(*inputs(torch.bfloat16))
    assert op in operations.seen
    ((text, modules),) = cuda_ops.attention.items()
    assert text.startswith(f"{kernel} (bf16 on capability ")
    assert modules == ["first", "second"]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def test_what_the_user_switches_off_is_not_chosen(fake):
    with CudaOps(target_of()) as cuda_ops, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        F.scaled_dot_product_attention(*inputs(torch.float16))
    assert list(cuda_ops.attention) == ["memory-efficient (fp16 on capability 8.0: flash is switched off)"]


@pytest.mark.parametrize(("trains", "kernel"), [(True, "memory-efficient"), (False, "flash")])
def test_what_is_not_trained_has_more_kernels(fake, trains, kernel):
    with CudaOps(target_of("RTX 3070")) as cuda_ops, torch.set_grad_enabled(trains):
        F.scaled_dot_product_attention(*inputs(torch.float16, size=224))
    assert [text.split()[0] for text in cuda_ops.attention] == [kernel]


def test_deterministic_algorithms_leave_cudnn_out(fake):
    torch.use_deterministic_algorithms(True)
    try:
        with CudaOps(target_of("H100 SXM5")) as cuda_ops:
            F.scaled_dot_product_attention(*inputs(torch.float16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [text.split()[0] for text in cuda_ops.attention] == ["flash"]


def test_afterwards_torchs_own_kernels_are_back():
    tensors = inputs(torch.float32)
    with CudaOps(target_of()):
        pass
    with Operations() as operations:
        F.scaled_dot_product_attention(*tensors)
    assert aten._scaled_dot_product_flash_attention_for_cpu.default in operations.seen


def test_dropout_keeps_a_byte_an_element(fake):
    x = torch.zeros(64, 10, requires_grad=True)
    with CudaOps(target_of()), Kept(x) as kept:
        F.dropout(x, 0.1)
    assert kept.nbytes == x.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_of_fp16_into_fp32_is_one_kernel(fake, dtype):
    """Of bf16 the input is cast before, which takes 4 bytes an element more for a moment."""
    x = torch.zeros(64, 10, dtype=dtype)
    peaks = []
    for softmax in (F.softmax, F.log_softmax):
        with CudaOps(target_of()), LiveBytes() as live:
            softmax(x, -1, dtype=torch.float32)
        peaks.append(live.peak)
    assert peaks == [4 * x.numel() * (1 if dtype is torch.float16 else 2)] * 2


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_step_by_step_and_a_note_says_so(layer):
    torch.manual_seed(0)
    model, x = layer(5, 7, num_layers=2), torch.randn(4, 3, 5)
    expected = model(x)[0]
    with CudaOps(target_of()) as cuda_ops, Operations() as operations:
        found = model(x)[0]
    # The CPU's own kernel sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not any("rnn_layer" in str(op) for op in operations.seen)
    assert cuda_ops.notes == [RECURRENT_NOTE]


def test_nothing_of_a_call_outlives_it(fake):
    tensors = inputs(torch.float16)
    with CudaOps(target_of()):
        out = F.scaled_dot_product_attention(*tensors)
    kept = weakref.ref(out.untyped_storage())
    del out
    assert kept() is None


# --- statistics of norms -------------------------------------------------------------------------------------------

X = torch.linspace(-2, 2, 4 * 8 * 6, dtype=torch.bfloat16).view(4, 8, 6)
NORM_ARGS = {
    aten.native_batch_norm.default: lambda w: (X, w, w, w.clone(), w.clone(), True, 0.1, 1e-5),
    aten.native_layer_norm.default: lambda w: (X, [6], w[:6], w[:6], 1e-5),
    aten.native_group_norm.default: lambda w: (X, w, w, 4, 8, 6, 2, 1e-5),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_cpu_keeps_statistics_in_the_format_of_the_real_one(norm, dtype):
    args = NORM_ARGS[norm](torch.ones(8, dtype=dtype))
    real = norm(*args)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        found = in_fp32(norm, faked, norm(*faked), False)
    assert [t.dtype for t in found] == [t.dtype for t in real]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_keeps_statistics_in_fp32(norm, dtype):
    with FakeTensorMode() as mode:
        args = [
            mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
            for a in NORM_ARGS[norm](torch.ones(8, dtype=dtype))
        ]
        output, *statistics = in_fp32(norm, args, norm(*args), True)
    assert output.dtype is torch.bfloat16
    assert {t.dtype for t in statistics} == {torch.float32}
