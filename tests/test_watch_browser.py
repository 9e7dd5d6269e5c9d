"""The live page in a real browser: it loads, lives, zooms, tells, survives, and nothing in a log becomes markup."""

from __future__ import annotations

import json
import math
import shutil
import threading
from contextlib import contextmanager

import pytest
from browser import chromium, until  # noqa: F401

from halfstep.watch.entry import RunStart, Step

pytest.importorskip("plotly", reason="the page needs the extra watch")
uvicorn = pytest.importorskip("uvicorn", reason="the page needs the extra watch")
make_app = pytest.importorskip("halfstep.watch.server").make_app

EVIL = "<img src=x onerror=alert(1)>"
NUM_STEPS = 4000
SPIKE = 2503
NAN_FROM = 260
WHY = "a long story of a step that never ended, " * 20
COUNT_DRAWN = """() => {
  window.drawn = 0;
  const { react } = Plotly;
  Plotly.react = (...parts) => (drawn++, react(...parts));
}"""


class Run:
    """A run whose log grows as a test says."""

    def __init__(self, folder, name, num_steps, *entries, loss=lambda step: 1.0 + 10.0 / step):
        self.folder, self.num_steps, self.loss = folder / name, 0, loss
        self.folder.mkdir(parents=True)
        info = {"requested": "fp16", "effective": "fp16", "reason": "as asked for", "device": "a CPU", "versions": {}}
        scale = {"kind": "dynamic", "init": 65536.0}
        start = RunStart(1e9, session="1", host="elsewhere", policy="fp16", scale=scale, info=info, num_elements=10)
        self.write(start.to_entry())
        self.steps(num_steps)
        self.write(*entries)

    def write(self, *entries):
        with open(self.folder / "rank-00000.jsonl", "a", encoding="utf-8") as log:
            log.writelines(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)

    def steps(self, count):
        steps = range(self.num_steps + 1, self.num_steps + count + 1)
        self.write(*(Step(step, 1e9 + step / 20, self.loss(step), 2.0, 65536.0).to_entry() for step in steps))
        self.num_steps += count


def alert(step, message, action="Look at the batch.", severity="warning"):
    alert = {"kind": "alert", "time": 1e9 + step / 20, "rule": "loss-spike", "step": step, "severity": severity}
    return {**alert, "message": message, "action": action, "rank": 0}


@contextmanager
def serving(folder):
    """The page of ``folder`` at the address that it gives. Pages that look close before it ends."""
    app = make_app(folder, token=None, hosts=["127.0.0.1"])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the server starts")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    loss = lambda step: 50.0 if step == SPIKE else 1.0 + 10.0 / step  # noqa: E731
    end = {"kind": "end", "time": 2e9, "state": "finished"}
    Run(folder, "long", NUM_STEPS, alert(SPIKE, f"the loss of step {SPIKE} is 50"), end, loss=loss)
    failed = {**end, "state": "failed", "reason": f"Overflow: {WHY}"}
    told = [
        alert(NAN_FROM, "NaN", severity="error"),
        {**alert(280, "later"), "time": 1e9 + 20},
        alert(301, WHY, severity="error"),
    ]
    reduction = {"kind": "reduction", "time": 1e9, "step": 40, "scale": 8192.0}
    loss_of_fails = lambda step: math.nan if step >= NAN_FROM else 2e-3 if step > 1 else 1.0  # noqa: E731
    Run(folder, "fails", 300, *told, reduction, failed, loss=loss_of_fails)
    Run(folder, f"odd/{EVIL}", 20, alert(5, EVIL, f"{EVIL} %{{x}}"), end)
    return folder


@pytest.fixture(scope="module")
def site(runs):
    with serving(runs) as address:
        yield address


@pytest.fixture(scope="module")
def contexts(chromium):  # noqa: F811
    """One of a desktop and one of a phone; pages in one share what they have loaded."""
    desktop = chromium.new_context(viewport={"width": 1200, "height": 1500})
    phone = chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    yield {"desktop": desktop, "phone": phone}
    desktop.close()
    phone.close()


@pytest.fixture
def open_page(contexts, site):
    """Opens a path. At its end no page has logged an error but one that is expected, broken the content policy, or run
    foreign script."""
    pages, faults, expected = [], [], []

    def open_(path, address=site, expects=(), on="desktop"):
        expected.extend(expects)
        pages.append(page := contexts[on].new_page())
        page.on("console", lambda message: faults.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message) or dialog.dismiss())
        page.goto(address + path)
        return page

    yield open_
    for page in pages:
        page.close()
    assert [fault for fault in faults if not any(words in fault for words in expected)] == []


def text(page, selector):
    return page.locator(selector).first.text_content()


def says(page, selector, words):
    until(lambda: words in (text(page, selector) or ""), f"{selector} says {words}")


def drawn(page, *charts):
    for chart in charts:
        page.locator(f"[data-chart={chart}] .main-svg").first.wait_for()


def range_of(page, chart):
    return page.evaluate(
        "chart => document.querySelector(`[data-chart=${chart}] .canvas`)._fullLayout.xaxis.range", chart
    )


def curve(page, chart):
    """The first curve of a chart, without the vertical lines: its steps and its values."""
    return page.evaluate(
        "chart => { const t = document.querySelector(`[data-chart=${chart}] .canvas`).data;"
        " const c = t.find(one => one.yaxis !== 'y2'); return [Array.from(c.x), Array.from(c.y)]; }",
        chart,
    )


def drag(page, chart, start, end):
    """Drag across the plot of a chart, from one share of its width to another."""
    area = page.locator(f"[data-chart={chart}] .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2 * box["width"], y, steps=3)
    page.mouse.move(box["x"] + end * box["width"], y, steps=3)
    page.mouse.up()


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_the_list_names_every_run_with_its_state_and_its_numbers(open_page):
    page = open_page("/")
    says(page, "h1", "3 runs: 1 failed")
    row = page.locator("tr[data-run=long]")
    says(page, "tr[data-run=long] td[data-key=last_step]", "4,000")
    says(page, "tr[data-run=long] .state", "✓finished")
    assert row.locator("td[data-key=scale]").text_content() == "2¹⁶"
    assert row.locator("td[data-key=num_alerts]").text_content() in ("1", "▲ 1")
    says(page, "tr[data-run=fails] td[data-key=loss]", "NaN")
    why = page.locator("tr[data-run=fails] .note")
    assert why.get_attribute("title").endswith(WHY)
    assert why.evaluate("node => node.scrollHeight > node.clientHeight && node.clientHeight < 50")  # two lines
    page.get_by_role("searchbox").fill("fai")
    until(lambda: page.locator("tbody tr").count() == 1, "the filter leaves one run")
    page.get_by_role("searchbox").fill("nothing like this")
    says(page, ".nothing", "No run matches")


def test_a_folder_without_runs_says_so(open_page, tmp_path):
    with serving(tmp_path) as address:
        page = open_page("/", address)
        says(page, "h1", "No runs")
        says(page, ".nothing", "No run yet")
        page.close()


def test_a_drag_zooms_all_charts_and_asks_for_detail_and_a_double_click_shows_all(open_page):
    page = open_page("/run/long")
    drawn(page, "events", "loss", "grad_norm", "scale", "steps_per_s")
    whole = range_of(page, "loss")
    assert whole[0] < 1
    assert whole[1] > NUM_STEPS
    steps, values = curve(page, "loss")
    assert len(steps) < NUM_STEPS
    assert max(values) == 50.0  # no zoom hides the spike

    drag(page, "grad_norm", 0.6, 0.65)
    until(lambda: range_of(page, "loss")[0] > 2000, "the drag zooms")
    low, high = range_of(page, "loss")
    assert low == pytest.approx(0.6 * NUM_STEPS, abs=60)
    assert high == pytest.approx(0.65 * NUM_STEPS, abs=60)
    for chart in ("events", "grad_norm", "scale", "steps_per_s"):
        assert range_of(page, chart) == [low, high]
    inside = range(math.ceil(low), math.floor(high))
    until(lambda: set(inside) <= set(curve(page, "loss")[0]), "every step in view is there")
    says(page, ".place", "steps 2,")

    page.mouse.dblclick(*middle(page, "loss"))
    until(lambda: range_of(page, "loss") == whole, "all is shown again")
    assert range_of(page, "scale") == whole
    page.locator(".strips").first.focus()
    page.keyboard.press("+")
    until(lambda: range_of(page, "loss") != whole, "a key zooms")
    page.keyboard.press("0")
    until(lambda: range_of(page, "loss") == whole, "a key shows all")


def middle(page, chart):
    box = page.locator(f"[data-chart={chart}] .nsewdrag").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.slow
def test_the_pointer_shows_the_numbers_of_its_step_in_every_chart(open_page):
    page = open_page(f"/run/odd/{EVIL}")
    drawn(page, "loss", "grad_norm")
    assert text(page, "[data-chart=loss] .values") == "1.5"
    page.mouse.move(*middle(page, "grad_norm"))
    says(page, ".place", "step 1")
    step = int(text(page, ".place").removeprefix("step "))
    says(page, "[data-chart=loss] .values", f"{1 + 10 / step:.4g}")
    assert page.locator("[data-chart=loss] .cursor").is_visible()
    page.mouse.move(2, 2)
    says(page, ".place", "steps 1 to 20")


def test_an_alert_stands_in_the_charts_and_in_the_list_and_a_click_goes_there(open_page):
    page = open_page("/run/long")
    drawn(page, "events", "loss")
    says(page, "#alerts", "1 alert")
    top = page.locator(".alerts.top .what")
    assert top.text_content() == f"loss-spikethe loss of step {SPIKE} is 50Look at the batch."
    entry = page.locator(".list button.entry:has(b)")
    assert entry.locator(".mark").text_content() == "▲ warning"
    assert entry.locator(".what").text_content() == f"loss-spikethe loss of step {SPIKE} is 50Look at the batch."
    line = (
        "() => document.querySelector('[data-chart=loss] .canvas').data"
        ".filter(one => one.yaxis === 'y2').map(one => Array.from(one.x))"
    )
    assert page.evaluate(line) == [[SPIKE, SPIKE, None]]
    entry.click()
    until(lambda: range_of(page, "loss")[0] > 1, "the click zooms")
    low, high = range_of(page, "loss")
    assert low < SPIKE < high
    assert high - low < 300
    says(page, ".place", f"step {SPIKE:,}")


@pytest.mark.slow
def test_a_failed_run_has_its_worst_alert_on_top_its_end_where_it_failed_and_marks_of_nan(open_page):
    page = open_page("/run/fails")
    page.emulate_media(color_scheme="light")
    drawn(page, "events", "loss")
    assert text(page, ".alerts.top .what").startswith(f"loss-spike{WHY}")
    assert text(page, ".alerts.top .more") == "and 1 more error, 1 warning"
    assert page.locator(".more a").get_attribute("href") == "#alerts"
    assert text(page, "header [href='#alerts']") == "◆ 2 errors"
    assert page.locator("[data-fact=alerts] dd").get_attribute("class") == "bad"
    assert page.locator("dt").all_text_contents()[:3] == ["loss", "gradient norm", "scale"]
    assert text(page, "[data-fact=loss] dd") == "NaN"
    says(page, "#alerts", "3 alerts, ")
    first = page.locator(".list .entry").first
    assert first.locator(".where").text_content().startswith("■ endstep 301")
    # Its loss falls by a factor of 500 at once: a linear axis would show nothing else.
    kind = "() => document.querySelector('[data-chart=loss] .canvas')._fullLayout.yaxis.type"
    assert page.evaluate(kind) == "log"
    page.get_by_role("button", name="log axis").click()
    until(lambda: page.evaluate(kind) == "linear", "the button chooses")

    # What is not finite is a mark at the top edge; the scheme changes all colours.
    assert text(page, "[data-chart=loss] .values") == "NaN"
    marks = page.evaluate(
        "() => { const one = document.querySelector('[data-chart=loss] .canvas').data.at(-1);"
        " return [one.marker.symbol, Array.from(one.x), Array.from(one.y)]; }"
    )
    assert marks[0] == "triangle-down"
    assert (marks[1][0], set(marks[2])) == (NAN_FROM, {1})

    look = (
        "() => [getComputedStyle(document.body).backgroundColor,"
        " document.querySelector('[data-chart=loss] .canvas').data.find(one => one.yaxis !== 'y2').line.color]"
    )
    assert page.evaluate(look) == ["rgb(251, 251, 250)", "#1f6fb8"]
    page.emulate_media(color_scheme="dark")
    until(lambda: page.evaluate(look) == ["rgb(18, 22, 27)", "#6cb2f0"], "page and chart are dark")


def test_a_reduction_of_the_scale_is_an_event(open_page):
    page = open_page("/")
    shown = page.evaluate("""async () => {
      const { Alerts } = await import("/static/alerts.js");
      const alerts = new Alerts(null, document.body);
      const placed = alerts.show([], [{ kind: "reduction", step: 7, scale: 8192, time: 1 }], false);
      return [placed.map(({ look, step }) => [look, step]), alerts.title.textContent, alerts.list.textContent];
    }""")
    assert shown[:2] == [[["reduction", 7]], "No alerts, 1 event"]
    assert "The guard lowered the loss scale to 2¹³." in shown[2]


def test_what_never_was_is_asked_for_seldom(open_page):
    page = open_page("/", expects=["404"])
    pause = page.evaluate("""async () => {
      const { ask } = await import("/static/ask.js");
      let isTold = false; // the list of runs has pauses, too
      return new Promise((paused) => {
        window.setTimeout = (_, pause) => isTold && paused(pause);
        ask(() => ({ none: "/run/none.json" }), null, () => (isTold = true));
      });
    }""")
    assert pause == 10000


def test_an_axis_that_is_chosen_stays(open_page):
    page = open_page("/")
    pressed = page.evaluate("""async () => {
      const { Strip } = await import("/static/strip.js");
      const strip = new Strip({ range: [0, 1], cursor: null }, { name: "loss", title: "Loss", canBeLog: true });
      strip.lines = [{ steps: [1, 2, 3], values: [1, 1, 100], marks: [] }];
      const button = strip.node.querySelector("button");
      const pressed = [button.ariaPressed];
      for (const press of [() => {}, () => button.click(), () => {}]) {
        press();
        strip.suit(3);
        pressed.push(button.ariaPressed);
      }
      return pressed;
    }""")
    assert pressed == ["false", "true", "false", "false"]


def test_lines_know_their_axis_their_words_and_their_band(open_page):
    page = open_page("/")
    one = """async ([name, parts]) => (await import("/static/line.js"))[name](...parts)"""
    call = lambda name, *parts: page.evaluate(one, [name, parts])  # noqa: E731
    line = lambda *values, bad=(): {  # noqa: E731
        "steps": list(range(1, len(values) + 1)), "values": values, "marks": [[9, value] for value in bad]
    }  # fmt: skip
    assert call("isSpiky", [line(1, 1, 1, 51)])
    assert not call("isSpiky", [line(1, 1, 1, 50)])
    assert not call("isSpiky", [line(0, 1, 1, 51)])
    assert not call("isSpiky", [line()])
    assert call("nonfiniteText", line(bad=[math.nan] * 2), 2, "loss") == "every loss is NaN"
    assert call("nonfiniteText", line(bad=[math.nan, math.inf]), 2, "loss") == "no loss is finite"
    assert call("nonfiniteText", line(bad=[math.nan]), 2, "loss") == "no loss is finite"  # of the other nobody knows
    assert call("nonfiniteText", line(1.0, bad=[math.nan]), 2, "loss") == ""
    band = call("bandOf", {"steps": [100, 200, 500], "low": [1, 2, 3], "high": [4, 5, 6]})
    assert band["steps"] == [0, 100, 100, 200, None, 400, 500]
    assert band["low"] == [1, 1, 2, 2, None, 3, 3]
    assert band["high"] == [4, 4, 5, 5, None, 6, 6]


def test_a_live_step_arrives_a_zoom_stays_and_a_deleted_run_is_told(open_page, tmp_path):
    run = Run(tmp_path, "live", 200)
    Run(tmp_path, "other", 5)
    with serving(tmp_path) as address:
        page = open_page("/run/live", address, expects=["404"])
        drawn(page, "loss")
        says(page, "[data-fact=steps] dd", "200")
        run.steps(50)
        run.write(alert(250, "it spiked"))
        says(page, "[data-fact=steps] dd", "250")
        until(lambda: curve(page, "loss")[0][-1] == 250, "the new step is drawn")
        says(page, "#alerts", "1 alert")
        drag(page, "loss", 0.2, 0.4)
        until(lambda: range_of(page, "loss")[1] < 150, "the drag zooms")
        zoomed = range_of(page, "loss")
        until(lambda: curve(page, "loss")[0][-1] < 150, "what is in view has come")
        page.evaluate(COUNT_DRAWN)
        run.steps(50)
        says(page, "[data-fact=steps] dd", "300")
        assert range_of(page, "loss") == zoomed
        frames = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(drawn))))"
        assert page.evaluate(frames) == 0  # nothing in view has changed
        shutil.rmtree(run.folder)
        says(page, ".state", "deleted")
        says(page, "header .note.bad", "the last that was seen")
        assert range_of(page, "loss") == zoomed
        page.goto(f"{address}/")
        says(page, "h1", "1 run: 1 stalled")
        page.close()


@pytest.mark.slow
def test_a_run_that_never_was_and_one_without_a_finite_loss(open_page, tmp_path):
    slow = Step(31, 1e9 + 60, math.inf, 2.0, 65536.0).to_entry()
    Run(tmp_path, "bad", 30, slow, loss=lambda step: math.inf)
    with serving(tmp_path) as address:
        page = open_page("/run/late", address, expects=["404"])
        says(page, ".state", "no such run")
        assert "there is no such run" in text(page, "header .note")
        assert page.locator("p > a[href='/']", has_text="See all runs").is_visible()
        assert page.locator(".strips").count() == 0
        page.goto(f"{address}/run/bad")
        says(page, "[data-chart=loss] .values", "no loss is finite")
        drawn(page, "grad_norm")
        assert page.locator("[data-chart=loss]").bounding_box()["height"] < 70
        assert not page.locator("[data-chart=loss] .plot").is_visible()
        assert text(page, "[data-chart=steps_per_s] .values") == text(page, "[data-fact=speed] dd") == "20"
        page.close()


def test_runs_are_compared_in_one_chart_and_one_that_is_deleted_leaves(open_page, tmp_path):
    folders = [
        Run(tmp_path, f"sweep/{name}", 50, loss=lambda step, at=at: at).folder for at, name in enumerate("abc", 1)
    ]
    with serving(tmp_path) as address:
        page = open_page("/", address, expects=["404"])
        for name in "abc":
            page.get_by_label(f"Compare sweep/{name}").check()
        page.get_by_role("link", name="Compare 3 runs").click()
        drawn(page, "loss", "grad_norm")
        values = page.locator("[data-chart=loss] .value")
        until(lambda: values.all_text_contents() == ["1", "2", "3"], "the legend has the last losses")
        names = "() => document.querySelector('[data-chart=loss] .canvas').data.map(one => one.y[0])"
        until(lambda: page.evaluate(names) == [1, 2, 3], "three curves")
        drawn(page, "steps_per_s")
        assert not page.locator("[data-chart=count_per_s]").is_visible()  # it is steps a second
        drag(page, "loss", 0.2, 0.6)
        until(lambda: range_of(page, "grad_norm")[1] < 40, "all charts zoom")
        shutil.rmtree(folders[1])
        says(page, "header .note.bad", "1 run not there any more: sweep/b.")
        until(lambda: page.evaluate(names) == [1, 3], "the others stay")
        page.locator("[data-chart=loss] .key").last.click()
        until(lambda: page.evaluate(names) == [1], "a run is hidden")
        page.close()


@pytest.mark.slow
def test_a_server_that_is_gone_or_refuses_is_told_until_it_is_back(open_page):
    page = open_page("/run/fails", expects=["Failed to load resource"])
    drawn(page, "loss")

    def told(line, handler):
        page.unroute("**/*.json*")
        page.route("**/*.json*", handler)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # asks at once
        until(lambda: text(page, "#news") == line, line)

    def refusal(status, error):
        return lambda route: route.fulfill(status=status, json={"error": error})

    told("no answer from halfstep watch, trying again", lambda route: route.abort())
    told("", lambda route: route.continue_())
    told("wrong name", refusal(421, "wrong name"))
    told("busy", refusal(503, "busy"))
    told("This page needs its token: open the whole address that halfstep watch printed.", refusal(401, "no token"))


@pytest.mark.slow
def test_nothing_is_drawn_or_sent_again_while_nothing_changes(open_page):
    page = open_page("/run/long")
    drawn(page, "loss", "grad_norm")
    until(lambda: page.evaluate("() => performance.getEntriesByType('resource').at(-1).responseStatus") == 304, "304")
    page.evaluate(COUNT_DRAWN)
    answers = []
    page.on("response", lambda response: answers.append(response.status))
    until(lambda: page.evaluate("() => drawn") or len(answers) >= 2, "two more rounds")
    assert answers[:2] == [304, 304]
    assert page.evaluate("() => drawn") == 0


def test_on_a_phone_nothing_scrolls_sideways_and_markup_in_names_and_messages_stays_text(open_page):
    page = open_page("/", on="phone")
    says(page, "h1", "3 runs")
    assert overflow(page) == 0
    assert not page.locator("thead").is_visible()  # each run is a card
    assert page.locator("tbody a", has_text=EVIL).count() == 1
    page.locator("tbody a", has_text=EVIL).click()
    drawn(page, "loss")
    assert text(page, "h1") == f"odd/{EVIL}"
    assert text(page, ".what:has(b)") == f"loss-spike{EVIL}{EVIL} %{{x}}"
    assert page.locator("img").count() == 0
    assert page.locator("[data-chart=loss] .canvas").bounding_box()["width"] > 370
    assert overflow(page) == 0
    page.goto(page.url.partition("/run/")[0] + "/compare?run=long&run=fails")
    drawn(page, "loss")
    assert overflow(page) == 0
