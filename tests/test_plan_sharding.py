"""One rank of several, against arithmetic by hand."""

import pytest
from reference.stack_nets import BLOCK_WEIGHTS, DEPTH, NUM_PARAMETERS, VOCABULARY, WIDTH, traced
from reference.step_traces import trained

from halfstep.errors import HalfstepError
from halfstep.plan.classic_case import largest
from halfstep.plan.sharding import GATHERED, REDUCED, sharded

pytestmark = pytest.mark.usefixtures("kernels_stay")
BLOCK, EDGE, NUM_BLOCKS = 202_383_360, 131_072_000, 32
SEVEN = {"embed": EDGE, **{f"layers.{n}.mlp": BLOCK for n in range(NUM_BLOCKS)}, "head": EDGE}
N7 = NUM_BLOCKS * BLOCK + 2 * EDGE
"""7B as Llama has it, 6.74e9 parameters: multiples of 8 throughout, so that 8 ranks divide them evenly."""


def test_the_seven_billion_of_16_bytes_a_parameter_on_8_ranks():
    trace = trained(SEVEN)
    assert N7 == 6_738_411_520
    assert trace.peak.nbytes == 16 * N7
    one, two, three = (sharded(trace, 8, stage) for stage in (1, 2, 3))
    assert one.nbytes == 4 * N7 + 4 * N7 + 8 * N7 // 8 == 9 * N7
    assert two.nbytes == 4 * N7 + 12 * N7 // 8 + 4 * BLOCK
    assert two.components[REDUCED] == 4 * BLOCK
    # Two blocks and what is outside of blocks in bf16, and a block's gradients in bf16 and fp32.
    assert three.nbytes == 16 * N7 // 8 + 2 * (2 * BLOCK + 2 * EDGE) + (2 + 4) * BLOCK
    assert three.components[GATHERED] == 4 * BLOCK + 4 * EDGE
    assert {peak.phase for peak in (two, three)} == {"backward"}
    assert three.how.startswith("derived: stage 3 over 8 ranks")


def test_parts_are_rounded_up_to_whole_numbers():
    trace = trained({"layers.0": 10, "layers.1": 3})
    assert sharded(trace, 4, 1).components["optimizer states"] == 2 * 4 * (3 + 1)
    assert sharded(trace, 1000, 1).components["optimizer states"] == 2 * 4 * (1 + 1)


def test_one_rank_of_stage_1_is_the_trace():
    trace = traced("llama", "bf16")
    alone = sharded(trace, 1, 1)
    assert (alone.nbytes, dict(alone.components)) == (trace.peak.nbytes, dict(trace.peak.components))


def test_stage_3_drops_casts_and_divides_what_the_step_makes():
    trace = trained({"layers.0": 800, "layers.1": 800}, activations=10, cast=10**6, temporaries=8_000)
    peak = sharded(trace, 8, 3)
    assert "16-bit weights" not in peak.components
    assert peak.nbytes == sum(peak.components.values())
    whole = trained({"layers.0": 800, "layers.1": 800}, temporaries=10**6)
    assert sharded(whole, 8, 2).components["step temporaries"] == 10**6 // 8
    assert sharded(whole, 8, 2).phase == "step"


def test_fp32_gathers_four_bytes():
    trace = trained({"layers.0": 100, "head": 50}, policy="fp32", activations=10**5)
    peak = sharded(trace, 2, 3)
    assert peak.components[GATHERED] == 4 * (2 * 100 + 50)


def test_units_of_a_real_step_are_its_blocks():
    trace = traced("llama", "bf16")
    peak = sharded(trace, 3, 3)
    block, rest = BLOCK_WEIGHTS + 2 * WIDTH, 2 * VOCABULARY * WIDTH + WIDTH
    assert DEPTH * block + rest == NUM_PARAMETERS
    assert peak.components[GATHERED] == 2 * (2 * block + rest)
    assert peak.components["weights"] <= -(-largest(trace, "weights") // 3) + 4 * (9 * DEPTH + 3)


@pytest.mark.parametrize(
    ("trace", "num_ranks", "stage", "message"),
    [
        (trained({"a": 4}), 8, 4, "stage 4: ZeRO has the stages 1, 2 and 3"),
        (trained({"a": 4}), 0, 1, "0 ranks: it is not a number of ranks"),
        (trained({"a": 4}), True, 1, "True ranks"),
        (trained({"a": 4}, policy="bf16 master=split16"), 8, 1, "master=split16 over 8 ranks"),
        (trained({"a": 4}, num_parameters=5), 8, 3, "stage 3 of a model with frozen weights"),
    ],
)
def test_what_is_not_derived_is_refused(trace, num_ranks, stage, message):
    with pytest.raises(HalfstepError, match=message):
        sharded(trace, num_ranks, stage)
