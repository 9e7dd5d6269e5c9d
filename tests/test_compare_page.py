"""The page: one file, nothing from outside, nothing hidden, nothing of the user's run as markup."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep import page
from halfstep.compare.page import html_page, write_html
from halfstep.compare.report import CompareReport
from halfstep.compare.trial import Trial
from halfstep.errors import HalfstepError

pytest.importorskip("plotly", reason="the page needs plotly")
NAN = math.nan


def trial(policy: str, seed: int, losses: tuple[float, ...], **fields: Any) -> Trial:
    n = len(losses)
    scale = (1024.0,) * n if policy.startswith("fp16") else (1.0,) * n
    values: dict[str, Any] = {"effective": policy, "steps": n, "scales": scale, "applied": (True,) * n}
    values |= {"replays": (0,) * n, "peak_memory_mib": 100.0, "samples_per_s": 10.0}
    return Trial(policy=policy, seed=seed, losses=losses, **(values | fields))


def build(trials: list[Trial], workload: str = "digits", device: str = "cpu") -> tuple[CompareReport, str]:
    report = CompareReport.from_trials(workload, device, 4, 3, trials)
    return report, html_page(report, trials)


def figures(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    read: dict[str, Any] = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return read


@pytest.fixture
def trials() -> list[Trial]:
    arms = {"fp32": 0.0, "bf16": 0.001, "fp16": 0.002}
    runs = [trial(p, s, (3.0, 2.0, 1.5 + s, 1 + gap + s)) for s in range(3) for p, gap in arms.items()]
    runs[-1] = trial("fp16", 2, (3.0, NAN, math.inf, NAN), applied=(True, False, False, False), replays=(1, 0, 0, 0))
    return runs


def test_the_page_asks_nothing_of_the_network(trials: list[Trial]) -> None:
    _, text = build(trials)
    own = re.sub(
        r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL
    )  # plotly.js names sites it can draw maps of
    assert len(text) - len(own) > 1_000_000, "plotly.js is inside"
    assert not re.search(r"https?:|(?:src|href)\s*=|@import|url\(", own)
    assert "default-src 'none'" in own
    assert text.count("</script>") == 3


def test_the_sentence_the_policies_and_the_reasons_are_there(trials: list[Trial]) -> None:
    report, text = build(trials)
    assert f"<h1>{report.headline}</h1>" in text
    for policy in ("fp32", "bf16", "fp16"):
        assert f"</i>{policy}</th>" in text
    assert "Seed 2: the final loss is nan, the first non-finite loss came at step 2 of 4." in text


def test_every_value_that_is_not_finite_is_a_cross(trials: list[Trial]) -> None:
    _, text = build(trials)
    crosses = [t for t in figures(text)["loss"]["data"] if t.get("marker", {}).get("symbol") == "x" and t.get("text")]
    assert [(t["x"], t["y"], t["text"]) for t in crosses] == [
        (
            [2, 3, 4],
            [3.0] * 3,
            [f"fp16, seed 2, step {step}: {loss}" for step, loss in ((2, "nan"), (3, "inf"), (4, "nan"))],
        )
    ]
    assert any("seed 2 has no difference" in " ".join(t["text"]) for t in figures(text)["difference"]["data"])


def test_the_mean_is_of_the_finite_seeds_and_not_smoothed(trials: list[Trial]) -> None:
    _, text = build(trials)
    (line,) = [t for t in figures(text)["loss"]["data"] if t.get("name") == "fp16" and t.get("mode") == "lines"]
    assert line["y"] == [3.0, 2.0, 2.0, 1.502]
    assert line["customdata"] == [3, 2, 2, 2]


def test_skips_and_replays_are_marked_on_the_scale(trials: list[Trial]) -> None:
    _, text = build(trials)
    marks = [t for t in figures(text)["scale"]["data"] if t["mode"] == "markers" and t["x"] not in ([], [None])]
    assert [(t["marker"]["symbol"], t["x"]) for t in marks] == [("x", [2, 3, 4]), ("circle-open", [1])]


def test_an_early_stop_is_marked() -> None:
    stopped = trial("fp16", 0, (2.0, 1.9), steps=4, stopped="the scale is at its floor")
    _, text = build([trial("fp32", 0, (2.0, 1.9, 1.8, 1.7)), stopped])
    assert "step 2: stopped, the scale is at its floor" in json.dumps(figures(text)["loss"])
    assert "difference" not in figures(text), "no seed has a difference to show"


def test_a_reference_alone_and_one_that_never_scales_has_fewer_charts() -> None:
    _, text = build([trial("fp32", 0, (2.0, 1.0), peak_memory_mib=None)])
    assert set(figures(text)) == {"loss", "speed"}


def test_a_loss_that_never_was_finite_still_makes_a_page() -> None:
    _, text = build([trial("fp32", s, (NAN, NAN)) for s in range(3)])
    assert len(figures(text)["loss"]["data"][-2]["x"]) == 6


def test_text_of_the_user_is_no_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)>%{y}{title}"
    runs = [trial("fp32", 0, (1.0,)), trial(evil, 0, (1.0,), stopped=evil)]
    _, text = build(runs, workload=evil, device=evil)
    assert "<img" not in text.replace(_plotly(), "")
    assert text.count("</script>") == 3
    assert "<img" not in json.dumps(figures(text))


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_the_file_holds_the_page(tmp_path: Path, trials: list[Trial]) -> None:
    report, text = build(trials)
    write_html(report, trials, str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text


def test_a_folder_that_is_missing_is_said(tmp_path: Path, trials: list[Trial]) -> None:
    report, _ = build(trials)
    with pytest.raises(HalfstepError, match="Name a file in a folder that exists"):
        write_html(report, trials, tmp_path / "nowhere" / "report.html")


def test_a_missing_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch, trials: list[Trial]) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(HalfstepError, match=r"halfstep\[torch\]"):
        page._plotly()
