"""The page of any report: whole, offline, escaped, and with plotly only where there is a chart."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

from halfstep.errors import HalfstepError
from halfstep.page import chart_text, document, html_page, write_html
from halfstep.report import Cell, Figure, Report, Sheet, Table

EVIL = "</script><img src=x onerror=alert(1)>&\"'"


@dataclass(frozen=True)
class FableReport(Report):
    content: Sheet
    charts: dict = field(default_factory=dict)

    def sheet(self):
        return self.content

    def figures(self):
        return self.charts


TABLE = Table(
    ("module", ">largest", "verdict"),
    [("blocks.0", "1.5", Cell("passed", "good")), ("blocks.1", "2.5", Cell("failed", "bad"))],
    title="What ran",
    note="Two of two.",
)
SHEET = Sheet("One sentence.", "charlm in fp16.", [TABLE, Table(("a",), [["b"]])], ["The end.", "The very end."])
FIGURE = Figure("A chart", "How to read it.", [{"type": "bar", "x": [1], "y": [2]}], {"xaxis": {}, "yaxis": {}})


class Reader(HTMLParser):
    """Checks that tags match, and keeps tags, texts and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and not {"script", "style"} & set(self.open):
            self.texts.append((self.open[-1], data.strip()))

    def of(self, tag):
        return [text for where, text in self.texts if where == tag]


def test_every_part_of_a_sheet_stands_on_the_page_in_its_order():
    reader = Reader(html_page(FableReport(SHEET)))
    assert reader.of("title") == reader.of("h1") == ["One sentence."]
    assert reader.of("h2") == ["What ran"]
    assert reader.of("th") == ["module", "largest", "verdict", "a"]
    assert reader.of("td") == ["blocks.0", "1.5", "blocks.1", "2.5", "b"]
    assert reader.of("span") == ["passed", "failed"]
    assert reader.of("p") == ["halfstep fable", "charlm in fp16.", "Two of two.", "The end.", "The very end."]


def test_cells_know_their_column_their_side_and_their_tone():
    reader = Reader(html_page(FableReport(SHEET)))
    cells = [attributes for tag, attributes in reader.tags if tag == "td"]
    assert cells[:3] == [
        {"class": "left", "data-label": "module"},
        {"class": "right", "data-label": "largest"},
        {"class": "left", "data-label": "verdict"},
    ]
    assert [a["class"] for tag, a in reader.tags if tag == "span"] == ["good", "bad"]


def test_a_page_without_charts_is_small_and_runs_nothing():
    text = html_page(FableReport(SHEET))
    assert len(text) < 10_000
    assert "<script" not in text
    assert "script-src" not in text
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in text
    assert not re.search(r"https?:|(?:src|href)\s*=|@import|url\(", text)


def test_a_sheet_of_one_sentence_is_a_page():
    reader = Reader(html_page(FableReport(Sheet("Nothing found."))))
    assert reader.of("h1") == ["Nothing found."]
    assert [tag for tag, _ in reader.tags if tag in ("table", "section")] == []


def test_charts_are_drawn_ahead_of_the_tables_and_come_with_plotly():
    pytest.importorskip("plotly")
    text = html_page(FableReport(SHEET, {"bars": FIGURE}))
    assert len(text) > 1_000_000
    assert text.count("</script>") == 3
    assert "script-src 'unsafe-inline'" in text
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert json.loads(found[1]) == {"bars": {"data": FIGURE.data, "layout": FIGURE.layout}}
    assert text.index("A chart") < text.index('<div id="bars">') < text.index("Two of two.") < text.index("The end.")


def test_text_of_the_user_is_no_markup():
    pytest.importorskip("plotly")
    table = Table((EVIL, f">{EVIL}"), [[EVIL, Cell(EVIL, "bad")]], title=EVIL, note=EVIL)
    chart = Figure(EVIL, EVIL, [{"name": EVIL}], {"xaxis": {}, "yaxis": {}})
    for charts in ({}, {"bars": chart}):
        text = html_page(FableReport(Sheet(EVIL, EVIL, [table], [EVIL]), charts))
        head, _, rest = text.partition("<script>")  # of plotly.js
        assert "<img" not in head
        assert text.count("</script>") == (3 if charts else 0)
        Reader(head + "</body></html>" if rest else text)
    reader = Reader(html_page(FableReport(Sheet(EVIL, EVIL, [table], [EVIL]))))
    assert reader.of("h1") == [EVIL]
    assert {a["data-label"] for tag, a in reader.tags if tag == "td"} == {EVIL}


def test_what_is_not_finite_never_reaches_a_chart():
    pytest.importorskip("plotly")
    with pytest.raises(ValueError, match="not JSON compliant"):
        document("", "", {"bars": Figure("", "", [{"x": [float("nan")]}], {})})


def test_a_chart_shows_text_as_it_is():
    assert chart_text("<b>%{y}") == "&lt;b&gt;% {y}"


def test_the_file_holds_the_page(tmp_path):
    write_html(FableReport(SHEET), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html_page(FableReport(SHEET))
    with pytest.raises(HalfstepError, match="Name a file in a folder that exists"):
        write_html(FableReport(SHEET), tmp_path / "nowhere" / "report.html")


def test_a_missing_plotly_names_the_extra_and_only_charts_need_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    html_page(FableReport(SHEET))
    with pytest.raises(HalfstepError, match=r"halfstep\[torch\]"):
        html_page(FableReport(SHEET, {"bars": FIGURE}))


def test_five_hundred_rows_scroll_below_a_head_that_stays():
    text = html_page(FableReport(Sheet("Long.", tables=[Table(("module",), [[f"layer.{i}"] for i in range(500)])])))
    reader = Reader(text)
    assert len(reader.of("td")) == 500
    assert [a.get("class") for tag, a in reader.tags if tag == "div"] == ["sheet", "scroll"]
    assert re.search(r"\.scroll \{ max-height: \d+vh; overflow: auto;", text)
    assert ".scroll thead th { position: sticky; top: 0;" in text
