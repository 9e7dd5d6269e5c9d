"""Known faults of mixed-precision loops, on torch.amp and on halfstep in one test each.

The loops are in the files of this folder, one fault a file. The same rule judges every library, so that torch.amp's
column shows that a rule can fail. Fabric and Accelerate, where they are installed, are held to docs/peers.md.
"""

import gc
from pathlib import Path

import pytest
from peers import (
    bf16_guard,
    changed_in_region,
    found_inf_two,
    inf_clipped,
    overflow_in_window,
    ragged_counts,
    scale_exhausted,
    scheduler_on_skip,
    short_window,
    state_formats,
    unsupported_format,
)
from peers.columns import COLUMNS, fabric_in, version_of
from peers.table import FAULTS, lines, seen, title

from halfstep import oplist

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
THEIRS, DROP_IN, STEPPER = "torch.amp", "halfstep GradScaler, autocast", "halfstep Stepper"


@pytest.fixture(autouse=True, scope="module")
def _no_region_of_other_tests():
    """One that only waits to be collected drops stale casts for torch.amp as well."""
    gc.collect()
    assert oplist.kernels("cpu")._num_users == 0


def faults_of(fault):
    """Whether it shows in torch.amp, in the drop-ins, in the Stepper."""
    theirs = seen(fault, THEIRS)
    assert theirs.fault, f"torch has mended this: update the docs. {title(fault)}: {theirs.words}"
    return [seen(fault, column).fault for column in (THEIRS, DROP_IN, STEPPER)]


def words_of(fault, column):
    return seen(fault, column).words


def test_scale_exhausted_by_200_overflows_then_a_finite_step():
    assert faults_of(scale_exhausted) == [True, False, False]
    assert words_of(scale_exhausted, THEIRS) == "scale 0, 178 of 178 weights NaN"
    for column in (DROP_IN, STEPPER):
        assert words_of(scale_exhausted, column).startswith("ScaleExhausted")


def test_a_promoted_module_goes_on_where_the_scale_is_exhausted():
    policy, applied, weights = scale_exhausted.promoted()
    assert "module:0=fp32" in policy
    assert applied
    assert weights.isfinite().all()


def test_one_inf_gradient_and_clipping():
    # The drop-ins have no say here: a bf16 loop has no scaler, and clips by torch's own function.
    assert faults_of(inf_clipped) == [True, True, False]
    assert words_of(inf_clipped, STEPPER).startswith("skipped")


def test_clipping_makes_every_other_gradient_zero():
    assert inf_clipped.gradients_after_clipping() == (39, 1)  # of 8 x 4 weights, 4 biases, 4 gates
    with pytest.raises(RuntimeError, match="non-finite"):
        inf_clipped.gradients_after_clipping(error_if_nonfinite=True)


def test_found_inf_of_2():
    assert faults_of(found_inf_two) == [True, False, False]


def test_overflow_in_micro_batch_2_of_4():
    assert faults_of(overflow_in_window) == [True, True, False]
    assert words_of(overflow_in_window, STEPPER).startswith("micro-batch 2 runs again")


def test_scheduler_on_a_skipped_step():
    assert faults_of(scheduler_on_skip) == [True, False, False]
    assert not scheduler_on_skip.by_scale().fault


def test_master_and_remainder_through_load_state_dict():
    assert faults_of(state_formats) == [True, None, False]


def test_scaler_as_a_bf16_guard():
    assert faults_of(bf16_guard) == [True, False, False]


def test_unsupported_autocast_format():
    assert faults_of(unsupported_format) == [True, False, False]


def test_weight_changed_in_place_inside_a_region():
    # autocast has no model to look at, so that it knows of an optimizer's step and of no other change.
    assert faults_of(changed_in_region) == [True, True, False]
    assert words_of(changed_in_region, DROP_IN).startswith("new weight after a step")


def test_short_last_window():
    assert faults_of(short_window) == [True, True, False]


def test_ragged_token_counts():
    assert faults_of(ragged_counts) == [True, True, False]


def test_fabric_computes_in_bf16_where_16_mixed_is_asked_for_on_a_cpu():
    need("Fabric")
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        engine = fabric_in("16-mixed")
    assert engine.strategy.precision.precision == "bf16-mixed"


def need(*columns):
    if missing := [column for column in columns if version_of(column) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")


@pytest.mark.parametrize("column", COLUMNS)
def test_the_page_says_what_is_seen(column):
    need(column)
    page = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in page)
    said = {row[0]: row[header.index(column)] for row in rows}
    found = {f"{n}. {title(fault)}": words_of(fault, column) for n, fault in enumerate(FAULTS, 1)}
    assert said == found, f"run benchmarks/peer_table.py and update the page: {column} {version_of(column)}"


def test_the_table_of_the_page_is_what_the_script_prints():
    need(*COLUMNS)
    assert "\n".join(lines()) in PAGE.read_text()
