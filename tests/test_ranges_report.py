"""The report of ranges: its tables, and its heat maps, cell by cell."""

from __future__ import annotations

import json
import math

import pytest
import torch
from reference.ranges import spread
from torch import nn

from halfstep.diagnosis.capture import Capture
from halfstep.explain.heat_map import heat_map
from halfstep.explain.histogram import Histogram
from halfstep.explain.module_range import ModuleRange
from halfstep.explain.ranges import ranges_of
from halfstep.explain.ranges_report import NUM_SHOWN, scale_text, share_text, without_repeats
from halfstep.page import html_page
from halfstep.policy import Policy

pytestmark = pytest.mark.usefixtures("kernels_stay")


def deep(n, policy="fp16", scale=2.0**8):
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(n)), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    capture = Capture(model, lambda: model(x).float().square().mean(), Policy.parse(policy), scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ranges_of(capture, optimizer, workload="deep")


def histogram(values):
    exponents = {}
    for value in values[values != 0].abs().tolist():
        e = math.frexp(value)[1] - 1
        exponents[e] = exponents.get(e, 0) + 1
    return Histogram(dict(sorted(exponents.items())), values.abs().max().item(), int((values == 0).sum()))


def one(module, values, kind="gradient", format="fp16", scale=1.0):
    return ModuleRange(module, kind, format, True, scale, histogram(values))


# --- the sheet -----------------------------------------------------------------------------------------------------


def test_the_sheet_shows_scales_formats_and_every_kind():
    report = deep(2)
    titles = [table.title for table in report.sheet().tables]
    assert titles == [
        "All gradients in fp16, by loss scale",
        "If everything were held in one format",
        "Activations",
        "Gradients of outputs",
        "Gradients of weights",
        "Weight updates",
    ]
    scales, formats, *kinds = report.sheet().tables
    assert [row[:2] for row in scales.rows] == [("1", "unscaled, best"), ("256", "now")]
    assert [row[0] for row in formats.rows] == ["fp16", "bf16", "e5m2", "e4m3"]
    for table in kinds:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert "deep in fp16 on cpu, step 1, loss scale 256." in str(report)


def test_of_many_modules_the_worst_are_shown_and_the_json_has_all():
    report = deep(30)
    table = next(table for table in report.sheet().tables if table.title == "Gradients of weights")
    assert len(table.rows) == NUM_SHOWN
    assert table.note.startswith(f"The worst {NUM_SHOWN} of 31 modules; JSON and page have all.")
    kept = [row for row in report.to_dict()["modules"] if row["kind"] == "weight gradient"]
    assert len(kept) == 31
    shown = {row[0] for row in table.rows}
    worst = max((r for r in report.modules if r.kind == "weight gradient"), key=lambda r: r.zero_pct)
    assert worst.module in shown


def test_a_container_that_repeats_its_last_part_is_left_out_of_tables_and_charts():
    report = deep(2)
    names = [row.module for row in without_repeats(report.modules) if row.kind == "activation"]
    assert names == ["0.0", "0.1", "1.0", "1.1", "2"]
    assert {row.module for row in report.modules} >= {"", "0", "1"}


def test_the_model_itself_stays_where_it_gives_something_of_its_own():
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) * 3

    model = Doubles()
    capture = Capture(model, lambda: model(torch.ones(2, 4)).float().sum(), Policy("fp16"))
    names = {row.module for row in without_repeats(ranges_of(capture).modules) if row.kind == "activation"}
    assert names == {"", "lin"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00 %"), (1e-6, "< 0.01 %"), (0.456, "0.46 %"), (23.46, "23.5 %"), (99.99, "> 99.9 %"), (100, "100 %")],
)
def test_a_share_never_looks_like_none_or_all(value, text):
    assert share_text(value) == text


def test_scales_are_written_out():
    assert [scale_text(s) for s in (1.0, 65536.0, 2.0**31, 0.25)] == ["1", "65536", "2147483648", "1/4"]


# --- the heat map --------------------------------------------------------------------------------------------------


def test_cells_are_the_shares_of_each_row():
    values = spread(3000, -20, 5)
    figure = heat_map("Gradients", [one("a", values), one("b", values[:100] * 4)])
    (cells,) = figure.data
    for shares, own in zip(cells["z"], (values, values[:100] * 4), strict=True):
        assert sum(10**share for share in shares if share is not None) == pytest.approx(100, rel=0.01)
        exponent = math.frexp(own.abs().max().item())[1] - 1
        column = cells["x"].index(exponent + 0.5)
        expected = own.abs() >= 2.0**exponent
        assert 10 ** shares[column] == pytest.approx(100 * expected.sum().item() / (own != 0).sum().item(), rel=0.02)
        assert shares[column + 1 :] == [None] * len(shares[column + 1 :])
    json.dumps(figure.layout, allow_nan=False)


def lines(figure):
    return {(shape["line"]["dash"], shape["x0"]) for shape in figure.layout["shapes"] if shape["type"] == "line"}


def test_limits_stand_where_the_format_and_the_scale_put_them():
    values = spread(500, -20, 5)
    top = math.log2(65504)
    plain = heat_map("Gradients", [one("a", values)])
    assert lines(plain) == {("solid", -25.0), ("solid", -14.0), ("solid", top)}
    scaled = heat_map("Gradients", [one("a", values, scale=2.0**10)])
    assert lines(scaled) == {("dot", x) for x in (-25.0, -14.0, top)} | {("solid", x - 10) for x in (-25.0, -14.0, top)}
    shades = [(s["x0"], s["x1"]) for s in scaled.layout["shapes"] if s["type"] == "rect"]
    low, high = scaled.layout["xaxis"]["range"]
    assert shades == [(low, -35.0), (top - 10, high)]


def test_all_values_and_limits_are_inside_the_chart():
    figure = heat_map("Gradients", [one("a", spread(500, -20, 30), scale=2.0**20)])
    low, high = figure.layout["xaxis"]["range"]
    assert low <= -45
    assert high >= 30
    assert all(low < x < high for _, x in lines(figure))


def test_a_long_tail_shares_one_cell_and_says_so():
    figure = heat_map("Activations", [one("a", spread(3000, -120, 0), kind="activation")])
    (cells,) = figure.data
    assert cells["x"][0] == -25 - 12 + 0.5
    assert 10 ** cells["z"][0][0] > 60  # 83 of 120 exponents
    assert cells["text"][0][0].startswith("a<br>below 2<sup>-36</sup>: ")


def test_bf16_is_compared_with_the_limits_of_fp16():
    figure = heat_map("Activations", [one("a", spread(500, -20, 5), "activation", "bf16")])
    assert lines(figure) == {("dot", -25.0), ("dot", -14.0), ("dot", math.log2(65504))}
    assert "The limits of bf16 are beyond this chart" in figure.note
    assert not [s for s in figure.layout["shapes"] if s["type"] == "rect"]


def test_names_are_text_and_long_ones_keep_their_end():
    evil = "<b>" + "x" * 60 + "%{y}</b>"
    figure = heat_map("Gradients", [one(evil, spread(50)), one("", spread(50))])
    labels = figure.layout["yaxis"]["ticktext"]
    assert labels[0].startswith("…")
    assert labels[0].endswith("% {y}&lt;/b&gt;")
    assert labels[1] == "(the model)"
    assert "<b>" not in json.dumps(figure.data)


@pytest.mark.parametrize("n", [1, 12, 13, 150, 151, 2000])
def test_any_number_of_modules_makes_a_chart(n):
    figure = heat_map("Gradients", [one(f"layer.{i}", spread(20)) for i in range(n)])
    labels = figure.layout["yaxis"]["tickvals"]
    room = figure.layout["height"] - figure.layout["margin"]["t"]
    assert room / len(labels) > 11
    assert len(labels) == n or n > 150
    assert len(figure.data[0]["z"]) == n


def test_the_page_has_a_chart_of_each_kind():
    pytest.importorskip("plotly")
    report = deep(2)
    text = html_page(report)
    for name in ("activation", "gradient", "weight-gradient", "update"):
        assert f'<div id="{name}">' in text
    assert list(report.figures()) == ["activation", "gradient", "weight-gradient", "update"]
