"""Operations and bytes of a step against closed forms, loops that count one by one, and torch's own counter."""

import pickle
from pathlib import Path

import pytest
import torch
from reference import flops as plain
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halfstep.plan import operations as module
from halfstep.plan.cost import Call
from halfstep.plan.operations import count_operations
from halfstep.plan.roofline import OffSize
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of

aten = torch.ops.aten
WORKLOADS = Path(plain.__file__)
NUM_TOKENS = plain.BATCH * plain.CONTEXT


def count(name, policy="fp32", card=None, batch_size=None):
    return count_operations(Subject(f"{WORKLOADS}:{name}", batch_size), policy, target_of(card))


def flops_of(operations, op="", **wanted):
    """Of the kernels whose name holds ``op`` and whose fields are those ``wanted``."""
    kernels = [k for k in operations.kernels if op in k.op and all(getattr(k, f) == v for f, v in wanted.items())]
    return sum(k.num * k.flops for k in kernels)


@pytest.fixture(scope="module")
def gpt():
    return count("gpt")


@pytest.fixture(scope="module")
def convolutions():
    return count("convolutions")


# --- operations ----------------------------------------------------------------------------------------------------


def test_a_gpt_takes_6_operations_for_each_weight_and_token_and_attention(gpt):
    model = plain.GPT()
    num_weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    width = plain.WIDTH // plain.HEADS
    size = (plain.BATCH, plain.HEADS, plain.CONTEXT, plain.CONTEXT, width)
    attention = plain.DEPTH * sum(plain.attention(*size, num_products, True) for num_products in (2, 5))
    assert flops_of(gpt, "attention") == attention
    assert gpt.flops == 6 * num_weights * NUM_TOKENS + attention
    up = plain.product(NUM_TOKENS, plain.WIDTH, 4 * plain.WIDTH)
    assert flops_of(gpt, module="blocks.0.up", phase="forward") == up
    assert flops_of(gpt, module="blocks.0.up", phase="backward") == 2 * up
    assert flops_of(gpt, phase="step") == 0


@pytest.mark.parametrize("name", plain.CONVOLUTIONS)
def test_a_convolution_is_what_loops_over_its_taps_count(convolutions, name):
    shapes = {}
    x = torch.zeros(2, *plain.IMAGE)
    for each, layer in plain.CONVOLUTIONS.items():
        shapes[each] = (x.shape, (x := layer(x)).shape)
    layer = plain.CONVOLUTIONS[name]
    positions = shapes[name][0 if name == "transposed" else 1][2:]
    once = plain.convolution(2, layer.weight.shape, positions, layer.groups)
    assert flops_of(convolutions, module=name, phase="forward") == once
    # The images take no gradient, so the first layer computes that of its weight alone.
    assert flops_of(convolutions, module=name, phase="backward") == (1 if name == "strided" else 2) * once


def test_a_recurrent_layer_multiplies_by_both_matrices_at_each_step():
    time, (to_input, to_state) = 5, [w.shape for w in plain.Reader().lstm.parameters() if w.dim() == 2]
    once = plain.recurrence(plain.BATCH, time, to_input, to_state)
    as_a_kernel = count("reader", card="cpu")
    assert flops_of(as_a_kernel, module="lstm", phase="forward") == once
    assert flops_of(as_a_kernel, module="lstm", phase="backward") == 2 * once
    assert not as_a_kernel.notes
    in_steps = count("reader")
    last = plain.product(plain.BATCH, *to_state)  # nobody asks for the gradient of the first state
    assert flops_of(in_steps, module="lstm") in (3 * once, 3 * once - last)
    kernels = [k for k in in_steps.kernels if k.module == "lstm"]
    assert sum(k.nbytes for k in kernels) == 0 or len(kernels) == 2
    assert all("recurrent" in note for note in in_steps.notes)


def test_what_a_checkpoint_computes_again_is_counted(gpt):
    again = count("checkpointed", card="cpu")
    blocks = sum(k.num * k.flops for k in gpt.kernels if k.phase == "forward" and (k.module or "").startswith("blocks"))
    # All of a block but its last product, whose result nobody keeps.
    down = plain.DEPTH * plain.product(NUM_TOKENS, 4 * plain.WIDTH, plain.WIDTH)
    assert again.flops - gpt.flops == blocks - down
    assert flops_of(again, phase="forward") == flops_of(gpt, phase="forward")


def test_torch_counts_the_same_where_nothing_is_causal_or_grouped():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    images = torch.zeros(2, 3, 9, 9, requires_grad=True)
    visited = []

    class Costs(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            visited.append(Call(func, args, kwargs or {}, result).flops() or 0)
            return result

    with Costs():
        model(images).sum().backward()
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert sum(visited) == counter.get_total_flops() > 0


def attention_call(name, query, key, value, is_causal, **more):
    """A call of an attention kernel, which need not run here: shapes tell what it computes."""
    tensors = {"query": torch.zeros(query), "key": torch.zeros(key), "value": torch.zeros(value)}
    op = getattr(aten, name).default
    return Call(op, (), tensors | {"is_causal": is_causal} | more, None)


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_what_loops_over_pairs_count(kernel, queries, keys, is_causal):
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))  # two heads of queries share one of keys
    for suffix, num_products in (("", 2), ("_backward", 5)):
        call = attention_call(f"_scaled_dot_product_{kernel}{suffix}", *shapes, is_causal)
        assert call.flops() == plain.attention(2, 4, queries, keys, 8, num_products, is_causal)


def test_other_products():
    matrix, vector, batch = torch.zeros(3, 4), torch.zeros(4), torch.zeros(2, 3, 4)
    for op, args, expected in (
        (aten.mv.default, (matrix, vector), plain.product(3, 4, 1)),
        (aten.addmv.default, (torch.zeros(3), matrix, vector), plain.product(3, 4, 1)),
        (aten.dot.default, (vector, vector), plain.product(1, 4, 1)),
        (aten.addbmm.default, (torch.zeros(3, 5), batch, torch.zeros(2, 4, 5)), 2 * plain.product(3, 4, 5)),
        (aten.bmm.default, (batch, torch.zeros(2, 4, 5)), 2 * plain.product(3, 4, 5)),
    ):
        assert Call(op, args, {}, op(*args)).flops() == expected
    for op, left, right, expected in (
        (aten._grouped_mm.default, (6, 4), (2, 4, 5), plain.product(6, 4, 5)),  # six rows in two groups
        (aten._grouped_mm.default, (4, 6), (6, 5), plain.product(4, 6, 5)),
        (aten._grouped_mm.default, (2, 3, 4), (2, 4, 5), 2 * plain.product(3, 4, 5)),
    ):
        assert Call(op, (torch.zeros(left), torch.zeros(right)), {}, None).flops() == expected
    assert Call(aten.add.Tensor, (vector, vector), {}, vector + vector).flops() is None


def test_a_layer_of_cudnn_is_counted_by_its_weights():
    lstm = nn.LSTM(8, 12, num_layers=2, bidirectional=True)
    weights = list(lstm.parameters())
    once = sum(plain.product(5 * 3, *w.shape) for w in weights if w.dim() == 2)
    named = {"input": torch.zeros(5, 3, 8), "weight": weights}
    assert Call(aten._cudnn_rnn.default, (), named, None).flops() == once
    for mask, times in (([True] * 4, 2), ([False, False, False, True], 1), ([True, False, False, False], 1)):
        call = Call(aten._cudnn_rnn_backward.default, (), named | {"output_mask": mask}, None)
        assert call.flops() == times * once


# --- bytes ---------------------------------------------------------------------------------------------------------

A, B = torch.zeros(6, 4), torch.zeros(6, 4)
ROWS = torch.tensor([0, 2])
QKV = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("op", "args", "read", "written"),
    [
        (aten.add.Tensor, (A, B), 2 * 96, 96),
        (aten.add.Tensor, (A, A), 96, 96),  # one tensor twice
        (aten.add_.Tensor, (A.clone(), B), 2 * 96, 96),
        (aten.relu_.default, (A.clone(),), 96, 96),
        (aten.add.Tensor, (A, B[:1].expand(6, 4)), 96 + 16, 96),  # one row for all
        (aten.mul.Tensor, (A[:, :2], 2.0), 48, 48),  # part of a storage
        (aten.mul.Tensor, (A[:, :2], A[:, :2]), 48, 48),  # the same part twice
        (aten.mul.Tensor, (A[:, :2], A[:, 2:]), 96, 48),  # both parts
        (aten.cat.default, ([A, B],), 2 * 96, 2 * 96),
        (aten.bmm.default, (QKV[:, :, :2], QKV[:, :2, :]), 120, 2 * 60),  # two views of one storage, never more than it
        (aten.t.default, (A,), 96, 0),
        (aten.unsafe_split.Tensor, (A, 3), 96, 0),
        (aten.empty_like.default, (A,), 0, 0),
        (aten.zeros_like.default, (A,), 0, 96),
        (aten.zero_.default, (A.clone(),), 0, 96),
        (aten.copy_.default, (A.clone(), B.half()), 48, 96),
        (aten._to_copy.default, (A,), 96, 96),
        (aten.embedding.default, (A, ROWS), 16, 32),
        (aten.index.Tensor, (A, [ROWS]), 16, 32),
        (aten.index_put_.default, (A.clone(), [ROWS], B[:2].clone()), 16 + 32, 0),
        (aten.nll_loss_forward.default, (A, torch.zeros(6, dtype=torch.long), None, 1, -100), 48, 8),
        (aten._foreach_add_.List, ([A.clone(), A.clone()], [B, B.clone()]), 4 * 96, 2 * 96),
        (aten._foreach_zero_.default, ([A.clone(), A.clone()],), 0, 2 * 96),
        (aten._foreach_copy_.default, ([A.clone(), A.clone()], [B, B.clone()]), 2 * 96, 2 * 96),
        (aten.max_pool2d_with_indices.default, (torch.zeros(1, 1, 4, 4), [2, 2]), 64, 16 + 32),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_bytes_of_one_kernel(op, args, read, written):
    assert Call(op, args, {}, op(*args)).nbytes() == (read, written)


@pytest.mark.parametrize("has_scale", [False, True])
def test_a_fused_optimizer_moves_28_bytes_a_parameter_and_4_more_to_unscale(has_scale):
    weight, grad, first, second = (torch.zeros(1000) for _ in range(4))
    step = torch.ones(())
    args = ([weight], [grad], [first], [second], [], [step])
    kwargs = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    scale = torch.ones(()) if has_scale else None
    call = Call(aten._fused_adamw_.default, args, {**kwargs, "grad_scale": scale, "found_inf": None}, ())
    read, written = call.nbytes()
    assert read == 4 * 4 * 1000 + 4 * (2 if has_scale else 1)
    assert written == 4 * (4 if has_scale else 3) * 1000
    assert read + written == pytest.approx((32 if has_scale else 28) * 1000, rel=1e-3)  # and two numbers


def test_16_bit_weights_are_cast_and_products_move_half(gpt):
    amp = count("gpt", "bf16")
    assert amp.flops == gpt.flops
    up = [k for k in amp.kernels if k.module == "blocks.0.up" and "addmm" in k.op]
    assert [(k.format, k.bytes_read, k.bytes_written) for k in up] == [
        ("bf16", 2 * (NUM_TOKENS * 32 + 32 * 128 + 128), 2 * NUM_TOKENS * 128)
    ]
    casts = [k for k in amp.kernels if k.module == "blocks.0.up" and "_to_copy" in k.op and k.phase == "forward"]
    assert {(k.bytes_read, k.bytes_written) for k in casts} == {
        (4 * n, 2 * n) for n in (NUM_TOKENS * 32, 32 * 128, 128)
    }


# --- formats, places, what is not counted ---------------------------------------------------------------------------


def test_formats_are_those_that_the_card_multiplies(gpt):
    assert {k.format for k in gpt.kernels} == {"fp32", None}
    assert {k.format for k in count("gpt", "tf32").kernels} == {"tf32", None}
    mixed = count("gpt", "fp16 module:head=fp32 tf32=on")
    assert {k.format for k in mixed.kernels if k.module == "head"} == {"tf32"}
    assert {k.format for k in mixed.kernels if k.module == "blocks.0.up"} == {"fp16", None}
    assert all((k.format is None) == (k.flops == 0) for k in mixed.kernels)


def test_kernels_have_their_modules_and_phases(gpt):
    fused = [k for k in gpt.kernels if "_fused_adamw_" in k.op]
    assert [(k.phase, k.module, k.num) for k in fused] == [("step", None, 1)]
    norms = [k for k in gpt.kernels if "native_layer_norm" in k.op and k.module == "blocks.1.norm"]
    assert [(k.phase, k.num) for k in norms] == [("forward", 1), ("backward", 1)]
    assert pickle.loads(pickle.dumps(gpt)) == gpt
    assert gpt.num_kernels == sum(k.num for k in gpt.kernels)
    assert not gpt.uncounted


def test_a_window_counts_all_its_micro_batches(gpt):
    three = count("accumulating")
    assert (three.batch_size, three.num_samples) == (plain.BATCH, 3 * plain.BATCH)
    assert three.flops == 3 * gpt.flops
    assert flops_of(three, module="head", phase="forward") == 3 * flops_of(gpt, module="head", phase="forward")
    assert three.with_batch(8).num_samples == 24


def test_growth_tells_of_other_batches_exactly(gpt):
    assert gpt.has_growth
    eleven = count("gpt", batch_size=11)
    told = gpt.with_batch(11)
    assert (told.batch_size, told.num_samples) == (eleven.batch_size, eleven.num_samples) == (11, 11)
    assert (told.flops, told.nbytes) == (eleven.flops, eleven.nbytes)
    assert set(told.kernels) == set(eleven.kernels)


def test_what_is_not_known_is_said_and_not_guessed():
    found = count("contrastive")
    assert found.uncounted == ("flops_test.double.default",)
    assert not any("flops_test" in k.op for k in found.kernels)
    assert not found.has_growth
    assert all(k.growth is None for k in found.kernels)
    assert any("grows faster than the batch" in note for note in found.notes)
    assert any("mask" in note for note in found.notes)
    inverse = Call(aten.linalg_inv_ex.default, (torch.eye(3),), {}, None)
    norm = Call(aten.linalg_vector_norm.default, (A,), {}, None)
    assert (inverse.flops(), inverse.has_products(), norm.has_products()) == (None, True, False)


def test_sizes_that_tensor_cores_do_not_like_are_named(gpt):
    assert count("odd_vocabulary", "bf16").off_sizes == (OffSize("head", "Linear", "out_features", 97, 8),)
    assert gpt.off_sizes == ()


def test_growth_is_not_known_where_bytes_outgrow_the_batch_or_kernels_differ():
    def window(nbytes, op="aten.exp.default"):
        return [module._Counted(op, "", "forward", None, 0, nbytes, 10)]

    assert module._growths(window(100), window(180), 4) == ([(0.0, 20.0, 0.0)], "")
    growths, why = module._growths(window(100), window(400), 4)
    assert growths == [None]
    assert "aten.exp.default in the model grows faster" in why
    growths, why = module._growths(window(100), window(180, "aten.log.default"), 4)
    assert growths == [None]
    assert "other kernels" in why
