"""Advice is true: what a rule says is worth so much is worth that, by a step in which the advice was taken."""

from dataclasses import replace

import pytest
from reference.advice_nets import spec
from reference.planted_steps import BACKWARD, FORWARD, STEP, alive_bytes, block, drawn_step, fake, plain_peak, step

from halfstep.plan.advice import (
    LEAST_SHARE,
    RULES,
    accumulation,
    advise,
    blocks,
    checkpointing,
    frozen_base,
    large_buffers,
    loss,
    loss_storages,
    math_attention,
    no_saving,
    optimizer_temporaries,
    peak_without,
    weight_casts,
    wide_inputs,
)
from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.size import size_text

WEIGHTS = block(400, "weights", 0, None)
STATES = block(800, "optimizer states", 0, None)


def real_saving(name, other, **how):
    return fake(spec(name), **how).peak.nbytes - fake(spec(other)).peak.nbytes


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_without_some_storages(seed):
    trace = drawn_step(seed)
    kept = replace(trace, storages=[s for s in trace.storages if s.component != "activations"])
    plain = max(sum(alive_bytes(kept, time).values()) for time in range(trace.num_events + 1))
    assert peak_without(trace, lambda s: s.component == "activations") == plain


# --- exact: the prediction is the difference of two true steps -------------------------------------------------------


@pytest.mark.slow
def test_a_fused_optimizer_saves_what_is_said():
    saving = optimizer_temporaries(fake(spec("few"), finds_growth=True))
    assert saving.nbytes == real_saving("few", "few_fused", finds_growth=True)
    assert "in the optimizer (aten._foreach_sqrt): fused=True" in saving.text
    assert f"saves {size_text(saving.nbytes)}, checkpointing nothing." in saving.text
    assert optimizer_temporaries(fake(spec("few_fused"))) is None


@pytest.mark.slow
def test_gradients_that_wait_cost_what_is_said():
    saving = accumulation(fake(spec("window")))
    assert saving.nbytes == real_saving("window", "window_of_one")
    assert f"3 of 64 need {size_text(saving.nbytes)} more" in saving.text
    assert accumulation(fake(spec("window_of_one"))) is None


def test_a_buffer_costs_what_is_said():
    saving = large_buffers(fake(spec("buffered")))
    scale = 4  # the Stepper's, which counts as a buffer too
    assert saving.nbytes - scale == real_saving("buffered", "window_of_one") == 40_000
    assert large_buffers(fake(spec("window_of_one"))).nbytes == scale


def test_inputs_in_sixteen_bits_save_what_is_said():
    saving = wide_inputs(fake(spec("wide")))
    assert saving.nbytes == real_saving("wide", "wide_in_bf16") == 4 * 8 * 3 * 64 * 64
    assert wide_inputs(fake(spec("wide_in_bf16"))) is None


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_checkpointing_saves_at_most_what_is_said():
    saving = checkpointing(fake(spec("many")))
    real = real_saving("many", "many_checkpointed")
    # What a checkpoint keeps besides is its input, a small part of what its block makes.
    assert 0.9 * saving.nbytes < real <= saving.nbytes
    assert saving.text.startswith("4 blocks like blocks.0 keep ")
    assert checkpointing(fake(spec("many_checkpointed"))) is None
    assert checkpointing(replace(fake(spec("many")), techniques=("checkpointing",))) is None


@pytest.mark.slow
def test_a_loss_in_pieces_saves_at_most_what_is_said():
    saving = loss(fake(spec("classes")))
    real = real_saving("classes", "classes_in_pieces")
    # The pieces are eighths: the largest of them stays.
    assert 0.8 * saving.nbytes < real <= saving.nbytes


@pytest.mark.slow
def test_frozen_weights_in_sixteen_bits_save_at_least_what_is_said():
    trace = fake(spec("frozen"))
    saving = frozen_base(trace)
    assert saving.nbytes == 2 * (trace.num_parameters - trace.num_trained)
    assert real_saving("frozen", "frozen_in_bf16") >= saving.nbytes
    assert frozen_base(fake(spec("frozen_in_bf16"))) is None
    assert frozen_base(fake(spec("many"))) is None


def test_weights_of_sixteen_bits_need_no_copies():
    saving = weight_casts(fake(spec("many")))
    # Two matrices in each of four blocks, in 2 bytes; those of the first layer and the head are gone by then.
    assert saving.nbytes == 4 * 2 * 4 * 32 * 32 * 2 - 32 * 4 * 32 * 2
    assert weight_casts(fake(spec("many"), "bf16 master=split16")) is None


# --- planted --------------------------------------------------------------------------------------------------------


def test_temporaries_of_the_optimizer_by_hand():
    gradients = block(400, "gradients", 150, 280, "mm", "m")
    passes = block(150, "activations", 5, 120, "mm", "m")
    temporaries = block(400, "step temporaries", 210, 220, "_foreach_sqrt")
    norm = block(1, "step temporaries", 209, 221, "_foreach_norm")
    trace = step(WEIGHTS, STATES, passes, gradients, temporaries, norm)
    assert optimizer_temporaries(trace).nbytes == 400
    # As far as the next peak, which is in the forward pass.
    assert (
        optimizer_temporaries(step(WEIGHTS, STATES, replace(passes, nbytes=600), gradients, temporaries)).nbytes == 200
    )
    # Not where the peak is elsewhere, the temporaries are also of masters, or the states are in 8 bits.
    assert optimizer_temporaries(step(WEIGHTS, STATES, replace(passes, nbytes=900), gradients, temporaries)) is None
    assert optimizer_temporaries(step(block(9, "master weights", 0, None), *trace.storages)) is None
    assert optimizer_temporaries(step(WEIGHTS, replace(STATES, nbytes=203), passes, gradients, temporaries)) is None


def test_the_logits_are_told_from_their_neighbours():
    hidden = block(64, "activations", 10, 190, "mm", "up")
    logits = block(500, "activations", 11, 180, "mm", "head")
    cast = block(1000, "activations", 12, 180, "_to_copy")
    softmax = block(1000, "activations", 13, 180, "_log_softmax")
    total = block(4, "activations", 14, 180, "nll_loss_forward")
    gradient = block(1000, "backward temporaries", 101, 110, "nll_loss_backward")
    back = block(1000, "backward temporaries", 102, 110, "_log_softmax_backward_data")
    back_cast = block(500, "backward temporaries", 103, 110, "_to_copy")
    weight = block(64, "gradients", 104, 280, "mm", "head")
    trace = step(WEIGHTS, hidden, logits, cast, softmax, total, gradient, back, back_cast, weight)
    assert loss_storages(trace) == {logits, cast, softmax, gradient, back, back_cast}
    # Without them weights, the two 64 and the loss are left.
    assert loss(trace).nbytes == trace.peak.nbytes - (400 + 64 + 64 + 4)
    assert loss(step(WEIGHTS, hidden, logits, weight)) is None
    # A log-softmax in 16 bits, with the copy that the loss is taken of.
    narrow, copy = replace(softmax, nbytes=500, born=12), replace(cast, born=13)
    assert loss_storages(step(WEIGHTS, hidden, logits, narrow, copy, total)) == {logits, narrow, copy}


def test_math_attention_by_hand():
    softmax = block(900, "activations", 10, 190, "_softmax", "blocks.0.attention")
    other = block(900, "activations", 11, 20, "_softmax", "router")
    trace = step(WEIGHTS, softmax, other)
    assert math_attention(trace) is None
    reasons = {"flash (bf16)": ["blocks.1.attention"], "math (memory-efficient takes no mask)": ["blocks.0.attention"]}
    saving = math_attention(replace(trace, attention=reasons))
    assert saving.nbytes == 900
    assert "runs as math (memory-efficient takes no mask) in 1 module: its softmax alone holds" in saving.text


def test_checkpointing_by_hand():
    made = [
        block(100, "activations", 10, 190, "mm", "blocks.0.up"),
        block(100, "activations", 11, 189, "gelu", "blocks.0"),
        block(100, "activations", 20, 150, "mm", "blocks.1.up"),
        block(100, "activations", 21, 149, "gelu", "blocks.1"),
        block(30, "16-bit weights", 22, 150, "_to_copy", "blocks.1.up"),
        block(50, "backward temporaries", 120, 121, "mm", "blocks.1.up"),
        block(50, "backward temporaries", 160, 161, "mm", "blocks.0.up"),
    ]
    trace = step(WEIGHTS, *made)
    assert trace.peak.nbytes == 400 + 400 + 30 + 50
    # In the backward pass of the second block: its own two, its copy, and what that pass makes.
    assert checkpointing(trace).nbytes == trace.peak.nbytes - (400 + 200 + 30 + 50)
    assert "2 blocks like blocks.1 keep" in checkpointing(trace).text
    # The copy stays until the forward pass ends.
    cast = replace(made[4], nbytes=700)
    bound = step(WEIGHTS, *made[:4], cast, *made[5:])
    assert checkpointing(bound).nbytes == bound.peak.nbytes - (400 + 200 + 700 + 50)
    # One that is not needed again after the forward pass is not made again.
    between = block(500, "backward temporaries", 112, 115, "mm", "head")
    unused = step(WEIGHTS, *made[:4], replace(cast, died=110), *made[5:], between)
    assert unused.peak.nbytes == 400 + 400 + 700
    assert checkpointing(unused).nbytes == unused.peak.nbytes - (400 + 700)
    assert checkpointing(replace(unused, storages=[*unused.storages, replace(between, born=113)])).nbytes == 400


def test_the_inputs_of_checkpoints_are_left():
    inputs = [block(100, "activations", 10 + at, 190 - at, "add", f"blocks.{at}") for at in range(3)]
    part = block(9, "forward temporaries", 5, 6, "mm", "blocks.0.up")
    assert checkpointing(step(WEIGHTS, part, *inputs)) is None
    assert checkpointing(step(WEIGHTS, part, *inputs, replace(inputs[0], born=30))) is not None


def test_a_window_whose_peak_is_in_the_optimizer_costs_nothing():
    phases = ((FORWARD, 1), (BACKWARD, 50), (FORWARD, 100), (BACKWARD, 150), (STEP, 200))
    passes = [block(300, "activations", born, born + 60, "mm", "m", FORWARD) for born in (10, 110)]
    gradients = block(400, "gradients", 75, 280, "mm", "m", BACKWARD)
    window = step(WEIGHTS, *passes, gradients, phases=phases, num_samples=4)
    # One micro-batch alone: weights with activations or with gradients, and not with both.
    assert accumulation(window).nbytes == (400 + 300 + 400) - (400 + 400)
    temporaries = block(300, "step temporaries", 210, 220, "_foreach_sqrt")
    assert accumulation(replace(window, storages=[*window.storages, temporaries])) is None


def test_blocks_are_named_by_their_place():
    names = ["blocks.0", "blocks.0.attention.out", "blocks.1.up", "head", None]
    assert blocks(names) == {"blocks.0": "blocks.0", "blocks.0.attention.out": "blocks.0", "blocks.1.up": "blocks.1"}


def test_a_copy_of_tokens_is_no_wide_input():
    """A tensor of half the size of an input is its copy only if a cast made it, in a policy of 16 bits."""
    inputs = block(800, "inputs", 1, None, phase=STEP)
    cast = block(400, "activations", 5, 150, "_to_copy", "m")
    assert wide_inputs(step(inputs, cast)).nbytes == 800
    assert wide_inputs(step(inputs, replace(cast, op="aten.mm.default"))) is None
    assert wide_inputs(step(inputs, cast, policy="fp32")) is None
    assert wide_inputs(step(inputs, replace(cast, nbytes=300))) is None
    assert wide_inputs(step(inputs, replace(cast, component="16-bit weights"))) is None


# --- against another policy -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_peaks_in_the_optimizer():
    reference, trace = (fake(spec("few"), policy, finds_growth=True) for policy in ("fp32", "bf16"))
    text = no_saving("fp32", reference, "bf16", trace, tokens_per_sample=10)
    batch = int(text.split(" from ")[1].split()[0])
    assert text == (
        "bf16 needs as much memory as fp32 here: both peaks are in the optimizer step, where nothing is in 16 bits;"
        f" it saves memory from {batch} samples ({10 * batch} tokens) in a micro-batch on."
    )
    for size, saves in ((batch - 1, False), (batch, True), (batch + 1, True)):
        assert (plain_peak(trace.with_batch(size)) < plain_peak(reference.with_batch(size))) is saves


def test_copies_that_cost_what_the_passes_save():
    def trace_of(*more, growth):
        return step(WEIGHTS, *more, growth=[0.0, *growth])

    wide = block(100, "activations", 5, 150, "mm", "m")
    cast, narrow = block(60, "16-bit weights", 4, 150, "_to_copy", "m"), replace(wide, nbytes=50)
    reference, trace = trace_of(wide, growth=[50.0]), trace_of(cast, narrow, growth=[0.0, 25.0])
    expected = (
        f"bf16 needs {size_text(10)} more than fp32 here: the 16-bit copies of the weights cost {size_text(60)}, and"
        f" what the passes hold shrinks by {size_text(50)}"
    )
    # 50 n against 60 + 25 n: from 3 on.
    text = no_saving("fp32", reference, "bf16", trace)
    assert text == f"{expected}; it saves memory from 3 samples in a micro-batch on."
    assert no_saving("fp32", reference, "bf16", replace(trace, growth=None)) == f"{expected}."
    never = replace(trace, growth=[0.0, 0.0, 50.0])
    assert no_saving("fp32", reference, "bf16", never) == f"{expected}; it saves nothing with any batch."
    assert no_saving("fp32", trace, "bf16", reference) is None
    # Copies alone are no reason where the passes hold more as well.
    both = trace_of(cast, replace(wide, nbytes=150), growth=[0.0, 75.0])
    assert no_saving("fp32", reference, "bf16", both) == (
        f"bf16 needs {size_text(110)} more than fp32 here; it saves nothing with any batch."
    )


# --- all together ---------------------------------------------------------------------------------------------------


def test_what_is_worth_most_comes_first():
    trace = fake(spec("classes"))
    texts = advise([PolicyPlan("fp32", refused="not here"), PolicyPlan("bf16", trace)])
    savings = sorted(s.nbytes for rule in RULES if (s := rule(trace)) and s.nbytes > LEAST_SHARE * trace.peak.nbytes)
    assert len(texts) == len(savings) > 1
    assert all(text.startswith("bf16: ") for text in texts)
    assert "logits and loss" in texts[0]
    assert loss(trace).nbytes == savings[-1]


def test_nothing_to_gain_is_said():
    small = [block(12, "activations", 1, 150, "mm", "m"), block(12, "buffers", 0, None)]
    trace = step(WEIGHTS, STATES, *small, policy="fp32")
    assert advise([PolicyPlan("fp32", trace)]) == (
        "fp32: none of the changes looked at is worth 2 % of the peak; weights, optimizer states and gradients are 98 %"
        " of it.",
    )
    assert advise([PolicyPlan("bf16", refused="T4 cannot compute bf16")]) == ()


def test_the_first_16_bit_policy_is_advised():
    plans = [PolicyPlan(p, fake(spec("few"), p, finds_growth=True)) for p in ("fp32", "bf16")]
    texts = advise(plans, tokens_per_sample=4)
    assert texts[0].startswith("bf16: the peak is in the optimizer")
    assert texts[-1] == no_saving("fp32", plans[0].trace, "bf16", plans[1].trace, 4)
    assert advise(plans[:1])[0].startswith("fp32: the peak is in the optimizer")
    assert {FORWARD, BACKWARD, STEP} >= {phase for phase, _ in plans[0].trace.phases}
