"""The report: its frozen JSON keys, strict JSON, a NaN that shows, and the table of a log."""

from __future__ import annotations

import json
import math

import pytest

from halfstep.compare.report import CompareReport
from halfstep.compare.trial import Trial
from halfstep.errors import HalfstepError
from halfstep.report import json_number

NAN = math.nan
FP32 = [1.00, 1.10, 0.90, 1.05, 0.97]


def trial(policy: str, seed: int, loss: float, **fields: object) -> Trial:
    scale = 1024.0 if policy == "fp16" else 1.0
    values = {
        "effective": policy,
        "steps": 4,
        "losses": (3.0, 2.0, loss, loss),
        "scales": (scale, scale, scale / 2, scale),
    }
    values |= {"applied": (True, False, True, True), "replays": (0, 0, 2, 0), "evaluated": loss}
    values |= {"peak_memory_mib": 1000.0 if policy == "fp32" else 600.0}
    values |= {"samples_per_s": 100.0 if policy == "fp32" else 250.0}
    return Trial(policy=policy, seed=seed, **(values | fields))  # type: ignore[arg-type]


def report(fp16: list[float], margin_pct: float | None = None, interrupted: bool = False) -> CompareReport:
    trials = [t for s, r in enumerate(FP32) for t in [trial("fp32", s, r)]]
    trials += [trial("fp16", s, c) for s, c in enumerate(fp16)]
    return CompareReport.from_trials("digits", "cpu", 4, 5, trials, margin_pct, interrupted)


def test_the_json_keys_are_these() -> None:
    data = report(FP32).to_dict()
    assert list(data) == ["workload", "device", "steps", "seeds", "policies"]
    policy = data["policies"][1]
    assert list(policy) == [
        "policy",
        "effective",
        "final_loss",
        "peak_memory_mib",
        "memory_saving_pct",
        "samples_per_s",
        "speedup",
        "steps_applied",
        "steps_skipped",
        "replays",
        "scale",
        "verdict",
    ]
    assert list(policy["final_loss"]) == ["mean", "sd", "values"]
    assert list(policy["scale"]) == ["min", "max", "last"]
    assert list(policy["verdict"]) == ["word", "gap", "ci_low", "ci_high", "margin", "seeds_needed", "reason"]


def test_an_interrupted_report_says_so() -> None:
    short = report(FP32[:3], interrupted=True)
    assert short.to_dict()["interrupted"] is True
    assert "interrupted" in str(short)


def test_what_a_policy_costs_stands_beside_the_reference() -> None:
    fp32, fp16 = report(FP32).to_dict()["policies"]
    assert (fp32["memory_saving_pct"], fp32["speedup"], fp32["verdict"]["word"]) == (0.0, 1.0, "reference")
    assert (fp16["memory_saving_pct"], fp16["speedup"]) == (pytest.approx(40.0), 2.5)
    assert (fp16["steps_applied"], fp16["steps_skipped"], fp16["replays"]) == (15, 5, 10)
    assert fp16["scale"] == {"min": 512.0, "max": 1024.0, "last": 1024.0}


def test_what_a_device_cannot_tell_is_null() -> None:
    trials = [trial(p, 0, 1.0, peak_memory_mib=None, samples_per_s=None) for p in ("fp32", "bf16")]
    bf16 = CompareReport.from_trials("w", "cpu", 4, 1, trials).to_dict()["policies"][1]
    assert {bf16[key] for key in ("peak_memory_mib", "memory_saving_pct", "samples_per_s", "speedup")} == {None}


def test_a_nan_is_a_string_in_the_json_and_a_nan_in_the_table() -> None:
    one = report([1.0, NAN, math.inf, -math.inf, 0.97])
    text = json.dumps(one.to_dict(), allow_nan=False)
    assert json.loads(text)["policies"][1]["final_loss"]["values"] == [1.0, "NaN", "Infinity", "-Infinity", 0.97]
    assert json.loads(text)["policies"][1]["final_loss"]["mean"] == pytest.approx(0.985)
    assert "0.985 ± 0.021, 3 diverged" in str(one)
    nothing = report([NAN] * 5)
    assert nothing.to_dict()["policies"][1]["final_loss"] == {"mean": "NaN", "sd": None, "values": ["NaN"] * 5}
    assert "nan, 5 diverged" in str(nothing)
    assert json_number(None) is None
    assert json_number(True) is True


def test_the_reason_holds_why_a_trial_diverged() -> None:
    trials = [trial("fp32", 0, 1.0), trial("fp16", 0, NAN, evaluated=None, stopped="the loss scale is at its floor")]
    one = CompareReport.from_trials("w", "cpu", 9, 1, trials)
    assert "Seed 0: stopped after 4 of 4 steps: the loss scale is at its floor." in str(one)
    assert one.found


@pytest.mark.parametrize(
    ("fp16", "found", "said"),
    [
        (FP32, False, "fp16 is equivalent to fp32"),
        ([loss + 1 for loss in FP32], True, "fp16 is materially worse than fp32"),
        ([loss - 1 for loss in FP32], False, "fp16 is not worse than fp32"),
        ([NAN, *FP32[1:]], True, "fp16 diverged in 1 of 5 trials"),
        ([1.1, 1.0, 1.0, 1.07, 1.01], False, "fp16 against fp32 is inconclusive ("),
        (FP32[:2], False, "no verdict on fp16 (3 paired seeds are needed)"),
    ],
)
def test_headline_and_exit_status(fp16: list[float], found: bool, said: str) -> None:
    one = report(fp16)
    assert one.found is found
    assert one.headline.startswith(f"digits over 5 seeds: {said}")
    assert str(one).splitlines()[0] == one.headline


def test_the_margin_in_percent_is_of_the_reference_mean() -> None:
    verdict = report(FP32, margin_pct=2.0).policies[1].verdict
    assert verdict.margin == pytest.approx(0.02 * sum(FP32) / 5)
    assert report([loss + 0.1 for loss in FP32], 2.0).policies[1].verdict.word == "materially worse"
    assert "2 % of fp32's mean" in report([loss + 0.1 for loss in FP32], 2.0).policies[1].verdict.reason
    with pytest.raises(HalfstepError, match="above 0"):
        report(FP32, margin_pct=-1.0)


def test_seeds_are_paired_by_number_not_by_place() -> None:
    trials = [trial("fp32", s, float(s)) for s in range(5)] + [trial("bf16", s, float(s)) for s in (4, 2, 1)]
    verdict = CompareReport.from_trials("w", "cpu", 4, 5, trials).policies[1].verdict
    assert (verdict.gap, verdict.num_pairs) == (0.0, 3)


def test_the_table_shows_each_policy_and_what_ran_in_its_place() -> None:
    trials = [trial("fp32", 0, 1.0), trial("auto", 0, 1.0, effective="bf16 [x]")]
    text = str(CompareReport.from_trials("w", "cpu", 4, 1, trials))
    assert "auto -> bf16 [x]" in text
    assert "600 (-40 %)" in text
    assert "250 (2.50x)" in text


def test_fp32_can_be_compared_with_itself() -> None:
    trials = [trial("fp32", s, loss) for _ in range(2) for s, loss in enumerate(FP32)]
    one = CompareReport.from_trials("w", "cpu", 4, 5, trials)
    assert [policy.policy for policy in one.policies] == ["fp32", "fp32 (2)"]
    assert one.policies[1].verdict.word == "equivalent"


def test_one_policy_alone_and_none_at_all() -> None:
    alone = CompareReport.from_trials("w", "cpu", 4, 1, [trial("fp32", 0, 1.0)])
    assert alone.headline == "w over 1 seed: fp32 ran alone, there is nothing to judge it against."
    with pytest.raises(HalfstepError, match="nothing to judge"):
        CompareReport.from_trials("w", "cpu", 4, 1, [])


def test_a_reason_that_befell_several_seeds_is_said_once() -> None:
    stop = {"stopped": "the loss scale is at its floor."}
    trials = [trial("fp32", seed, 0.9) for seed in range(3)]
    trials += [trial("fp16", seed, 0.9, **stop) for seed in (0, 2)] + [trial("fp16", 1, math.nan)]
    reason = CompareReport.from_trials("mlp", "CPU", 4, 3, trials).policies[1].reason
    assert "Seeds 0, 2: stopped after 4 of 4 steps: the loss scale is at its floor." in reason
    assert "Seed 1: the final loss is nan" in reason
