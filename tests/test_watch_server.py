"""The pages of a folder of runs: what each address answers, while runs grow, go, and come again."""

import gzip
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from http.client import HTTPConnection
from urllib.parse import quote, urlsplit

import pytest
from asgi import Client

from halfstep.errors import HalfstepError
from halfstep.watch import shelf, store
from halfstep.watch.api import Api, View
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.golden import Band
from halfstep.watch.runs import Runs
from halfstep.watch.server import make_app, serve
from halfstep.watch.shelf import Busy, Gone, Shelf

START = 4e9  # never long ago, so that no run is stalled
ALERT = {"rule": "loss-spike", "step": 3, "severity": "warning", "message": "up", "action": "look", "rank": 0}


def write(folder, entries, rank=0):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank-{rank:05d}.jsonl", "a", encoding="utf-8") as file:
        file.writelines(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries)


def steps(first, last, loss=lambda step: 1.0 / step):
    return [Step(n, START + n, loss(n), 2.0, scale=1024.0).to_entry() for n in range(first, last + 1)]


def run_entry(rank=0, num_ranks=1):
    return RunStart(START, rank, num_ranks, "abc", "elsewhere", 1, policy="fp16").to_entry()


def alert(**changes):
    return {"kind": "alert", "time": START + 3.5, **ALERT, **changes}


END = {"kind": "end", "time": START + 1000, "state": "finished"}


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    write(folder / "plain", [run_entry(), *steps(1, 20), alert(), END])
    write(folder / "exp" / "deep", [run_entry(), *steps(1, 5)])
    return folder


@pytest.fixture
def client(runs):
    with Client(make_app(runs, token=None, hosts=[])) as client:
        yield client


def names_of(client):
    return [run["name"] for run in client.get("/runs.json").json()["runs"]]


# What there is.


def test_the_list_has_every_run_in_short(client):
    listed = client.get("/runs.json").json()
    assert (listed["folder"], listed["is_complete"]) == ("runs", True)
    plain = next(run for run in listed["runs"] if run["name"] == "plain")
    assert {run["name"] for run in listed["runs"]} == {"plain", "exp/deep"}
    assert (plain["state"], plain["first_step"], plain["last_step"], plain["num_alerts"]) == ("finished", 1, 20, 1)
    assert plain["loss"] == pytest.approx(1 / 20)


def test_the_folder_has_its_name_wherever_it_is_named_from(runs, monkeypatch):
    monkeypatch.chdir(runs)
    with Client(make_app(".", token=None, hosts=[])) as client:
        assert client.get("/runs.json").json()["folder"] == "runs"


def test_a_run_has_its_series_alerts_and_events(client):
    answer = client.get("/run/plain.json")
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert found["run"]["name"] == "plain"
    assert found["is_complete"] is True
    assert found["range"] == [1, 20]
    assert found["series"]["loss"]["steps"] == list(range(1, 21))
    assert found["series"]["loss"]["values"] == pytest.approx([1 / n for n in range(1, 21)])
    assert set(found["series"]) == {"loss", "grad_norm", "scale", "seconds", "count_per_s", "memory_mib"}
    assert found["alerts"] == [{**ALERT, "time": START + 3.5}]
    assert [event["kind"] for event in found["events"]] == ["end"]
    assert (found["golden"], found["layers"], found["ranges"]) == (None, None, None)
    assert (found["skips"], found["replays"]) == ([], [])


def test_a_zoom_gives_the_steps_in_it(client):
    found = client.get("/run/plain.json?first=5&last=9&points=10&rank=").json()
    assert found["range"] == [5, 9]
    assert set(found["series"]["loss"]["steps"]) == {5, 6, 7, 8, 9}
    assert [alert["step"] for alert in found["alerts"]] == [3]  # on the time axis of the whole run


def test_a_run_without_a_step_has_its_page(client, runs):
    write(runs / "new", [run_entry()])
    found = client.get("/run/new.json").json()
    assert (found["run"]["state"], found["range"]) == ("empty", [None, None])
    assert found["series"]["loss"] == {"steps": [], "values": [], "nonfinite": []}
    assert client.get("/run/plain.json?first=50&last=60").json()["series"]["loss"]["steps"] == []
    assert client.get("/compare.json?run=new").json()["range"] == [None, None]


def test_points_bound_an_answer(client, runs):
    write(runs / "long", [run_entry(), *steps(1, 3000)])
    few = client.get("/run/long.json?points=10").json()["series"]["loss"]["steps"]
    many = client.get("/run/long.json").json()["series"]["loss"]["steps"]
    assert 2 <= len(few) <= 20
    assert 500 <= len(many) <= 2000


def test_alerts_are_those_of_all_ranks_once(client, runs):
    write(runs / "two", [run_entry(0, 2), *steps(1, 5), alert()])
    write(runs / "two", [run_entry(1, 2), *steps(1, 6, lambda n: 7.0), alert(), alert(step=2, rank=1)], rank=1)
    default, second = client.get("/run/two.json").json(), client.get("/run/two.json?rank=1").json()
    assert [(alert["step"], alert["rank"]) for alert in default["alerts"]] == [(3, 0), (2, 1)]
    assert {(alert["step"], alert["rank"]) for alert in second["alerts"]} == {(3, 0), (2, 1)}
    assert (default["run"]["rank"], default["run"]["last_step"]) == (0, 5)
    assert (second["run"]["rank"], second["run"]["last_step"]) == (1, 6)
    assert second["series"]["loss"]["values"] == [7.0] * 6
    missing = client.get("/run/two.json?rank=2")
    assert missing.status == 404
    assert "rank 2" in missing.json()["error"]


def test_an_explanation_is_short_and_the_last_ranges_are_whole(client, runs):
    producer = {"op": "matmul", "line": 3}
    long = {"kind": "explanation", "time": START, "step": 2, "reason": "inf", "before": [1] * 100, "producer": producer}
    ranges = [{"kind": "ranges", "time": START, "step": n, "modules": [{"name": f"m{n}"}]} for n in (2, 4)]
    write(runs / "told", [run_entry(), *steps(1, 2), long, ranges[0], *steps(3, 4), ranges[1]])
    found = client.get("/run/told.json").json()
    assert found["ranges"]["modules"] == [{"name": "m4"}]
    (event,) = found["events"]
    assert (event["reason"], event["producer"]) == ("inf", producer)
    assert "before" not in event


def test_json_has_no_bare_nan_even_from_a_log_of_another_program(client, runs):
    start = '{"kind": "run", "time": 1.0, "info": {"device": NaN, "versions": {"torch": [-Infinity]}}}\n'
    ranges = '{"kind": "ranges", "time": 1.0, "step": 2, "best_scale": NaN, "all": [Infinity, [-Infinity]]}\n'
    bad = Step(3, START + 3, math.nan, math.inf).to_entry()
    write(runs / "odd", [start, *steps(1, 2), bad, ranges])
    found = client.get("/run/odd.json").json()
    assert found["series"]["loss"]["nonfinite"] == [[3, "NaN"]]
    assert found["series"]["grad_norm"]["nonfinite"] == [[3, "Infinity"]]
    assert (found["run"]["loss"], found["run"]["device"]) == ("NaN", "NaN")
    assert found["run"]["versions"] == {"torch": ["-Infinity"]}
    assert (found["ranges"]["best_scale"], found["ranges"]["all"]) == ("NaN", ["Infinity", ["-Infinity"]])


def test_an_alert_with_a_time_that_is_none_and_without_a_rank_is_shown(client, runs):
    odd = {key: value for key, value in alert(time="late").items() if key != "rank"}
    write(runs / "odd", [run_entry(), *steps(1, 4), alert(step=4), odd])
    found = client.get("/run/odd.json").json()["alerts"]
    assert [(alert["time"], alert["step"], alert["rank"]) for alert in found] == [("late", 3, 0), (START + 3.5, 4, 0)]


def test_several_runs_are_compared(client):
    found = client.get("/compare.json?run=plain&run=exp/deep&run=plain&metric=grad_norm").json()
    assert [run["name"] for run in found["runs"]] == ["plain", "exp/deep"]
    assert (found["metric"], found["range"], found["golden"]) == ("grad_norm", [1, 20], None)
    assert found["series"]["exp/deep"] == {"steps": [1, 2, 3, 4, 5], "values": [2.0] * 5, "nonfinite": []}
    assert client.get("/compare.json?run=plain").json()["metric"] == "loss"


def test_a_missing_run_of_a_comparison_is_named(client):
    answer = client.get("/compare.json?run=plain&run=nowhere")
    assert answer.status == 404
    assert "nowhere" in answer.json()["error"]


@pytest.mark.parametrize(
    "query",
    [
        "rank=-1",
        "rank=x",
        "rank=1&rank=2",
        "rank=" + "9" * 5000,
        "first=1.5",
        "first=9&last=3",
        "last=1e3",
        "last=" + "9" * 16,
        "points=9",
        "points=5001",
        "points=%D9%A3%D9%A3",
        "version=-1",
    ],
)
def test_a_wrong_parameter_is_refused_with_one_line(client, query):
    answer = client.get(f"/run/plain.json?{query}")
    assert answer.status == 400
    (line,) = answer.json()["error"].splitlines()
    assert line.startswith(query.partition("=")[0])
    assert len(line) < 200


@pytest.mark.parametrize("query", ["", "run=", "metric=loss", "run=plain&metric=__class__", "run=plain&points=0"])
def test_a_wrong_comparison_is_refused(client, query):
    assert client.get(f"/compare.json?{query}").status in ((404,) if query == "run=" else (400,))


def test_twenty_runs_are_compared_and_no_more(client):
    assert client.get("/compare.json?" + "&".join(f"run=n{n}" for n in range(20))).status == 404
    answer = client.get("/compare.json?" + "&".join(f"run=n{n}" for n in range(21)))
    assert answer.status == 400
    assert "20" in answer.json()["error"]


def test_prometheus_reads_the_metrics(client):
    pytest.importorskip("prometheus_client")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'run="exp/deep"' in answer.body.decode()


# Names.


@pytest.mark.parametrize("name", ["x.json", "a b", "100%", "a%2Fb", "ü/ß", "<b>&", "q?x#y", "a/x.json.json", "run"])
def test_every_name_has_a_page_and_a_twin(client, runs, name):
    write(runs / name, [run_entry(), *steps(1, 3)])
    assert name in names_of(client)
    twin = client.get(f"/run/{quote(name)}.json")
    assert twin.status == 200
    assert twin.json()["run"]["name"] == name
    page = client.get(f"/run/{quote(name)}{'/' if name.endswith('.json') else ''}")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert client.get(f"/run/{quote(name)}/.json").json() == twin.json()


def test_a_run_and_one_with_json_at_its_end_are_two(client, runs):
    write(runs / "x", [run_entry(), *steps(1, 3)])
    write(runs / "x.json", [run_entry(), *steps(1, 7)])
    assert client.get("/run/x.json").json()["run"]["last_step"] == 3
    assert client.get("/run/x.json.json").json()["run"]["last_step"] == 7
    assert client.get("/run/x.json/").headers["content-type"].startswith("text/html")


# What changes.


def test_steps_arrive_while_training_writes(client, runs):
    assert client.get("/run/exp/deep.json").json()["run"]["last_step"] == 5
    write(runs / "exp" / "deep", [*steps(6, 8), '{"kind": "step", "step": 9, "ti'])
    found = client.get("/run/exp/deep.json").json()
    assert found["series"]["loss"]["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    (deep,) = [run for run in client.get("/runs.json").json()["runs"] if run["name"] == "exp/deep"]
    assert deep["last_step"] == 8
    write(runs / "new", [run_entry(), *steps(1, 2)])
    assert "new" in names_of(client)


@pytest.mark.parametrize("address", ["/runs.json", "/run/exp/deep.json", "/compare.json?run=exp/deep&run=plain"])
def test_nothing_new_is_304(client, runs, address):
    first = client.get(address)
    version = first.json()["version"]
    tag = first.headers["etag"]
    asked = f"{address}{'&' if '?' in address else '?'}version={version}"
    for again in (client.get(address, if_none_match=tag), client.get(asked)):
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    write(runs / "exp" / "deep", steps(6, 6))
    for again in (client.get(address, if_none_match=tag), client.get(asked)):
        assert again.status == 200
        assert again.json()["version"] != version


def test_another_view_of_a_run_has_another_version(client):
    tag = client.get("/run/plain.json").headers["etag"]
    assert client.get("/run/plain.json?first=3", if_none_match=tag).status == 200
    assert client.get("/run/exp/deep.json", if_none_match=tag).status == 200


def test_versions_of_two_servers_differ_since_their_golden_runs_may(runs):
    first, second = Api(runs), Api(runs)
    assert first.runs()["version"] != second.runs()["version"]
    first.close()
    second.close()


def test_a_deleted_run_is_gone_and_its_store_closed(client, runs, monkeypatch):
    closed = []
    close = store.Store.close
    monkeypatch.setattr(store.Store, "close", lambda self: (closed.append(self), close(self)))
    assert client.get("/run/plain.json").status == 200
    shutil.rmtree(runs / "plain")
    answer = client.get("/run/plain.json")
    assert answer.status == 404
    assert "plain" in answer.json()["error"]
    assert len(closed) == 1
    assert names_of(client) == ["exp/deep"]
    assert client.get("/run/exp/deep.json").status == 200
    write(runs / "plain", [run_entry(), *steps(1, 2)])
    assert client.get("/run/plain.json").json()["run"]["last_step"] == 2


def test_the_list_alone_notices_a_deleted_run(client, runs, monkeypatch):
    closed = []
    close = store.Store.close
    monkeypatch.setattr(store.Store, "close", lambda self: (closed.append(self), close(self)))
    names_of(client)
    shutil.rmtree(runs / "exp")
    assert names_of(client) == ["plain"]
    assert len(closed) == 1


def test_a_store_that_fails_is_opened_anew(client, monkeypatch):
    closed, opened = [], []
    close, update, start = store.Store.close, store.Store.update, store.Store.__init__

    def fail(self, longest_s=0.2):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store.Store, "close", lambda self: (closed.append(self), close(self))[1])
    monkeypatch.setattr(store.Store, "__init__", lambda self, *place: (opened.append(self), start(self, *place))[1])
    monkeypatch.setattr(store.Store, "update", fail)
    answer = client.get("/run/plain.json")
    assert answer.status == 503
    assert "Permission denied" in answer.json()["error"]
    listed = {run["name"]: run for run in client.get("/runs.json").json()["runs"]}
    assert "Permission denied" in listed["plain"]["why"]
    assert len(closed) == len(opened) == 3
    monkeypatch.setattr(store.Store, "update", update)
    assert client.get("/run/plain.json").status == 200


def test_a_run_that_is_deleted_and_written_anew_between_two_looks(client, runs):
    assert client.get("/run/plain.json").json()["run"]["last_step"] == 20
    shutil.rmtree(runs / "plain")
    write(runs / "plain", [run_entry(), *steps(1, 30, lambda n: 5.0)])
    found = client.get("/run/plain.json").json()
    assert found["series"]["loss"]["values"] == [5.0] * 30


def test_a_deleted_folder_of_runs_is_an_empty_list_or_one_line(client, runs):
    shutil.rmtree(runs)
    answer = client.get("/runs.json")
    assert answer.status in (200, 404)
    assert answer.json().get("runs", []) == []
    assert client.get("/run/plain.json").status == 404


def test_an_ended_run_is_not_opened_again(client, runs, monkeypatch):
    names_of(client)
    looked = []
    look = Shelf.look
    monkeypatch.setattr(Shelf, "look", lambda self, name, *rest: (looked.append(name), look(self, name, *rest))[1])
    names_of(client)
    assert looked == ["exp/deep"]
    write(runs / "plain", steps(21, 22))
    names_of(client)
    assert "plain" in looked


# Work is bounded.


def test_a_long_run_waits_and_the_others_do_not(client, runs, monkeypatch):
    goes_on, waits = threading.Event(), threading.Event()
    update = store.Store.update

    def slow(self, longest_s=0.2):
        if threading.current_thread().name != "halfstep shelf" and self.name == "plain":
            waits.set()
            assert goes_on.wait(20)
        return update(self, longest_s)

    class Named(store.Store):
        def __init__(self, folder, rank=0):
            super().__init__(folder, rank)
            self.name = folder.name

        update = slow

    monkeypatch.setattr(shelf, "Store", Named)
    monkeypatch.setattr(shelf, "_MOST_USERS", 1)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(other.get("/run/plain.json")))
    with Client(client.app) as other:
        thread.start()
        assert waits.wait(20)
        assert client.get("/run/exp/deep.json").status == 200
        busy = client.get("/run/plain.json")
        assert busy.status == 503
        assert "plain" in busy.json()["error"]
        listed = {run["name"]: run for run in client.get("/runs.json").json()["runs"]}
        assert (listed["plain"]["state"], listed["exp/deep"]["last_step"]) == ("reading", 5)
        assert client.get("/runs.json").json()["is_complete"] is False
        assert "too many" in listed["plain"]["why"]
        goes_on.set()
        thread.join()
    assert answers[0].status == 200


def test_many_at_once_agree(client):
    answers = client.get_all(["/run/plain.json", "/runs.json", "/compare.json?run=plain&run=exp/deep"] * 4)
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers[::3]}) == 1


def test_few_wait_for_a_store_and_not_for_long(runs, monkeypatch):
    found = Shelf(Runs(runs))
    with found.look("plain", 0):
        with pytest.raises(Busy, match="too many"), found.look("plain", 0, patience_s=0.001):
            pass
        monkeypatch.setattr(shelf, "_MOST_USERS", 1)
        with pytest.raises(Busy, match="too many"), found.look("plain", 0, patience_s=1000.0):
            pass
    found.close()


def test_few_stores_stay_open(runs, monkeypatch):
    for n in range(6):
        write(runs / f"n{n}", [run_entry(), *steps(1, 2)])
    found = Shelf(Runs(runs), most=3)
    for n in (0, 1, 2, 0, 3, 4):
        with found.look(f"n{n}", 0) as (opened, is_complete):
            assert is_complete
            assert opened.summary()["last_step"] == 2
    assert list(found._slots) == [("n0", 0), ("n3", 0), ("n4", 0)]
    found.close()
    found.close()
    assert not found._slots
    with pytest.raises(Busy, match="ending"), found.look("n0", 0):
        pass
    with pytest.raises(Gone, match="nowhere"):
        found.folder_of("nowhere")


def test_a_log_that_one_look_cannot_take_in_is_taken_in_afterwards(runs, monkeypatch):
    # Nothing but the work of the thread that catches up, and a log of several bites.
    bites, all_in = [], threading.Event()
    update = store.Store.update

    def bite(self, longest_s):
        if threading.current_thread().name != "halfstep shelf":
            return False
        bites.append(update(self, 0.0))
        if bites[-1]:
            all_in.set()
        return bites[-1]

    monkeypatch.setattr(store.Store, "update", bite)
    write(runs / "long", [run_entry(), *steps(1, 8000)])
    api = Api(runs)
    first = api.run("long", None, View(points=10))
    assert (first["is_complete"], first["run"]["last_step"]) == (False, None)
    assert all_in.wait(20)
    monkeypatch.undo()
    now = api.run("long", None, View(points=10), first["version"])
    assert (now["is_complete"], now["run"]["last_step"]) == (True, 8000)
    assert bites[:-1] == [False] * (len(bites) - 1)
    assert len(bites) > 2
    api.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "halfstep shelf"]


def test_the_golden_band_keeps_its_extremes_in_few_blocks(runs):
    band = Band(range(100, 2100, 100), [1.0] * 7 + [0.5] + [1.0] * 12, [2.0] * 13 + [math.inf] + [2.0] * 6)
    api = Api(runs, band)
    whole = api.run("plain", None, View())["golden"]
    assert whole == {
        "steps": list(band.steps),
        "low": list(band.low),
        "high": [*band.high[:13], "Infinity"] + [2.0] * 6,
    }
    few = api.run("plain", None, View(points=10))["golden"]
    assert few["steps"] == list(range(200, 2200, 200))
    assert few["low"] == [1.0, 1.0, 1.0, 0.5] + [1.0] * 6
    assert few["high"] == [2.0] * 6 + ["Infinity"] + [2.0] * 3
    part = api.run("plain", None, View(first=150, last=250))["golden"]
    assert part["steps"] == [200, 300]
    assert api.compare(["plain"], "loss", View())["golden"] == whole
    assert api.compare(["plain"], "scale", View())["golden"] is None
    api.close()


# The page and its files.


def test_the_page_is_the_same_whatever_it_shows(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.body.startswith(b"<!doctype html>")
    assert client.get("/run/plain").body == client.get("/compare?run=plain").body == page.body
    missing = client.get("/run/nowhere")
    assert (missing.status, missing.body) == (404, page.body)


def test_files_are_kept_as_long_as_their_address_says(client):
    page = client.get("/").body.decode()
    name, _, tag = page.partition('src="/static/')[2].partition('"')[0].partition("?v=")
    assert name == "page.js"
    kept = client.get(f"/static/{name}?v={tag}")
    asked = client.get(f"/static/{name}?v=old")
    assert kept.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in kept.headers["cache-control"]
    assert asked.headers["cache-control"] == "private, no-cache"
    assert kept.body == asked.body
    again = client.get(f"/static/{name}", if_none_match=kept.headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_plotly_is_packed_once(client):
    plain = client.get("/static/plotly.js")
    packed = client.get("/static/plotly.js", accept_encoding="br, gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "accept-encoding"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 2
    assert b"plotly.js v" in plain.body[:200]


@pytest.mark.parametrize(
    "address", ["/nothing", "/run", "/static/", "/static/none.js", "/static/../server.py", "/runs.json/"]
)
def test_nothing_at_an_address(client, address):
    answer = client.get(address)
    assert answer.status == 404
    assert answer.json() == {"error": "There is nothing at this address."}


def test_a_fault_of_ours_is_one_line_and_told_in_the_terminal(client, monkeypatch, caplog):
    monkeypatch.setattr(Api, "runs", lambda self, seen=None: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # as uvicorn sees it
        client.get("/runs.json?token=secret")
    assert "failed at '/runs.json'" in caplog.text
    assert "secret" not in caplog.text


# The server.


def test_it_serves_until_ctrl_c_with_connections_open(runs):
    program = (
        "import sys; from halfstep.watch.server import serve\n"
        "serve(sys.argv[1], '127.0.0.1', 0, None, [], lambda url: print(url, flush=True))\n"
        "print('ended')"
    )
    # Whoever is deaf is left alone with the end of the process.
    deaf_ones = ["ignore:unclosed transport:ResourceWarning", "ignore:unclosed <socket:ResourceWarning"]
    options = [f"-W{option}" for option in ["error", *deaf_ones]]
    with subprocess.Popen(
        [sys.executable, *options, "-c", program, runs], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}runs.json", timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 2
            assert answer.headers["server"] is None
        parts = urlsplit(url)
        assert parts.hostname == "127.0.0.1"
        kept, half = HTTPConnection(parts.netloc, timeout=20), socket.create_connection((parts.hostname, parts.port))
        kept.request("GET", "/run/plain.json")
        kept.getresponse().read()
        half.sendall(b"GET /runs.json HTTP/1.1\r\nHost: ")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((parts.hostname, parts.port))
        deaf.sendall(b"GET /static/plotly.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert deaf.recv(1) == b"H"  # and reads no more of its megabytes
        with pytest.raises(HalfstepError, match=rf"--port {parts.port}: another program listens there"):
            serve(runs, "127.0.0.1", parts.port, None, [], pytest.fail)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        kept.close()
        half.close()
        deaf.close()
    assert (process.returncode, out, err) == (0, "ended\n", "")
    assert [name for name in os.listdir(runs / "plain") if name.endswith(("-wal", "-journal"))] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folder": "nowhere"}, "RUNS_DIR nowhere: there is no such folder"),
        ({"folder": __file__}, "it is not a folder"),
        ({"host": "no such name"}, "--host no such name: nothing has this name"),
        ({"host": "192.0.2.1"}, "--host 192.0.2.1: this machine has no such address"),
        ({"port": 70000}, "--port 70000"),
        ({"token": "short"}, "it is too short, too long"),
        ({"token": "with a space in it, and long"}, "the token"),
    ],
)
def test_what_cannot_be_served_is_one_line(runs, changes, message):
    call = {"folder": runs, "host": "127.0.0.1", "port": 0, "token": None, "golden": [], "on_ready": pytest.fail}
    with pytest.raises(HalfstepError, match=message):
        serve(**{**call, **changes})


def test_a_missing_package_names_the_extra(runs, monkeypatch):
    monkeypatch.delitem(sys.modules, "halfstep.watch.routes", raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(HalfstepError, match=r"starlette.* is not installed.*halfstep\[watch\]"):
        make_app(runs, token=None, hosts=[])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(HalfstepError, match=r"uvicorn is not installed"):
        serve(runs, "127.0.0.1", 0, None, [], pytest.fail)
