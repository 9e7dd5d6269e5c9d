"""Alerts reach people: over real servers on loopback, over a command, in spite of faults, and without a secret told."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import subprocess
import sys
import threading
import time
import types
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from halfstep.errors import HalfstepError
from halfstep.events import Alert
from halfstep.watch import notify, targets
from halfstep.watch.notify import Notifier, send_test
from halfstep.watch.targets import target_of

ALERT = Alert("loss-spike", 1200, "warning", "the loss is <9.3> & 7 spreads above its median", "Lower the rate.")
SECRET = "hunter2-Zm9v"


def alert(rule="loss-spike", step=1200, severity="warning"):
    return Alert(rule, step, severity, "it went up", "Look at it.")


class Server:
    """An HTTP server: it keeps what comes, and answers the next of ``statuses``, else 200; 0 is no answer."""

    def __init__(self):
        self.requests, self.statuses, self.awake = queue.SimpleQueue(), [], threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.put((self.path, dict(self.headers), body))
                status = outer.statuses.pop(0) if outer.statuses else 200
                if status == 0:
                    outer.awake.wait(20)
                    return
                self.send_response(status)
                self.send_header("Location", f"{outer.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # what a followed redirect would become

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def bodies(self):
        return [self.requests.get_nowait()[2] for _ in range(self.requests.qsize())]

    def close(self):
        self.awake.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.close()


@contextlib.contextmanager
def notifier(*targets, run="charlm", pauses_s=(0.01, 0.02), timeout_s=60.0, **kwargs):
    made = Notifier(targets, run, pauses_s, **kwargs)
    try:
        yield made
    finally:
        made.close(timeout_s)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def messages(caplog):
    """What halfstep logged; the mail server logs, too."""
    return [record.getMessage() for record in caplog.records if record.name == "halfstep"]


def writes(path):
    """A command that adds the rule and what it read to a file."""
    code = "import os,sys;open(sys.argv[1],'a').write(os.environ['HALFSTEP_RULE']+' '+sys.stdin.read()+chr(10))"
    return f'command:{sys.executable} -S -c "{code}" {path}'


def test_a_webhook_gets_json(server):
    with notifier(f"webhook:{server.url}/hook?key=1#part") as made:
        made.put(ALERT)
    path, headers, body = server.requests.get_nowait()
    assert path == "/hook?key=1"
    assert headers["Content-Type"] == "application/json"
    assert body.pop("host")
    assert body == {
        "run": "charlm",
        "rule": "loss-spike",
        "step": 1200,
        "rank": 0,
        "severity": "warning",
        "message": "the loss is <9.3> & 7 spreads above its median",
        "action": "Lower the rate.",
        "held_back": {},
    }


def test_a_login_in_the_url_becomes_a_header(server):
    with notifier(f"webhook:http://me:a%40b@127.0.0.1:{server.port}/") as made:
        made.put(ALERT)
    assert server.requests.get_nowait()[1]["Authorization"] == "Basic bWU6YUBi"


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed(server, status):
    server.statuses = [status]
    report = send_test([f"webhook:{server.url}/"])
    assert report.to_dict()["targets"] == [
        {"target": "webhook 127.0.0.1", "arrived": False, "why": f"it answered {status}"}
    ]
    assert len(server.bodies()) == 1


def test_a_command_gets_the_alert_on_its_input_and_in_its_environment(tmp_path):
    with notifier(writes(tmp_path / "told")) as made:
        made.put(Alert("stalled", 7, "error", 'no step; $(touch x) "; rm -rf /', "Look."))
    rule, _, text = (tmp_path / "told").read_text().partition(" ")
    assert rule == "stalled"
    assert json.loads(text)["message"] == 'no step; $(touch x) "; rm -rf /'


def test_a_variable_is_a_part_of_its_word(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", f"{tmp_path}/a 'b")
    with notifier(writes("${PLACE}$$c")) as made:
        made.put(ALERT)
    assert (tmp_path / "a 'b$c").exists()


class Mailbox:
    """What an SMTP server of aiosmtpd got."""

    def __init__(self):
        self.mails, self.logins = [], []

    async def handle_DATA(self, server, session, envelope):
        self.mails.append(message_from_bytes(envelope.content, policy=policy.default))
        return "250 OK"

    def login(self, server, session, envelope, mechanism, data):
        from aiosmtpd.smtp import AuthResult

        self.logins.append((data.login, data.password))
        return AuthResult(success=True)


def test_apprise_reaches_a_mail_server_and_a_web_server_that_refuses(server, monkeypatch, caplog, capfd):
    controller = pytest.importorskip("aiosmtpd.controller")
    pytest.importorskip("apprise")
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    caplog.set_level(1)
    server.statuses = [401]
    box = Mailbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    smtp = controller.Controller(box, "127.0.0.1", port, authenticator=box.login, auth_require_tls=False)
    smtp.start()
    try:
        targets = (
            f"mailto://me:$MAIL_PASSWORD@127.0.0.1:{port}?from=run@example.org&to=you@example.org",
            f"json://127.0.0.1:{server.port}/{SECRET}",
        )
        with notifier(*targets, pauses_s=()) as made:
            made.put(ALERT)
    finally:
        smtp.stop()
    (mail,) = box.mails
    assert box.logins == [(b"me", SECRET.encode())]
    assert mail["To"] == "you@example.org"
    assert mail["Subject"] == "halfstep: charlm, step 1200, rank 0: loss-spike (warning)"
    text = mail.get_body(("plain",)).get_content()
    assert "the loss is <9.3> & 7 spreads above its median.\nLower the rate.\nHost: " in text.replace("\r", "")
    body, last = server.bodies()
    assert "held-back" in last["title"]
    assert "Not sent since the last message: 1 loss-spike" in last["message"]
    assert body["title"] == mail["Subject"]
    assert body["type"] == "warning"
    assert messages(caplog) == ["target json: an alert did not arrive: it answered 401"]
    told = [record.getMessage() for record in caplog.records if record.name != "mail.log"]  # that is the server
    assert SECRET not in "\n".join([*told, *capfd.readouterr()])


def test_a_failing_target_is_tried_again_and_does_not_hurt_the_others(server, caplog):
    server.statuses = [500, 503]
    other = Server()
    with notifier(f"webhook:{server.url}", f"webhook:{other.url}", pauses_s=(0.01, 0.01, 0.01)) as made:
        made.put(ALERT)
        wait_for(lambda: server.requests.qsize() == 3)  # the end would cut the pauses short
    other.close()
    assert len(server.bodies()) == 3
    assert len(other.bodies()) == 1
    assert not caplog.messages  # it arrived in the end


def test_a_target_that_fails_is_reported_once_until_it_works_again(server, caplog):
    server.statuses = [500, 500, 200, 500]
    with notifier(f"webhook:{server.url}", pauses_s=()) as made:
        for rule in ("a", "b", "c", "d", "e"):
            made.put(alert(rule))
    assert caplog.messages == ["target webhook 127.0.0.1: an alert did not arrive: it answered 500"] * 2
    held = {body["rule"]: body["held_back"] for body in server.bodies()}
    assert held["c"] == {"a": 1, "b": 1}
    assert held["e"] == {"d": 1}


def test_a_server_that_hangs_blocks_nobody(server, caplog):
    server.statuses = [0]
    quick = Server()
    made = Notifier([f"webhook:{server.url}", f"webhook:{quick.url}"], "charlm")
    start = time.monotonic()
    for step in range(1000):
        made.put(alert(step=step))
    assert quick.requests.get(timeout=5)[2]["step"] == 0
    made.close(0.2)
    made.close()
    assert time.monotonic() - start < 3
    quick.close()
    assert caplog.messages == ["target webhook 127.0.0.1: 1000 alerts did not arrive before the end"]


def test_a_rule_speaks_once_in_ten_minutes(server):
    now = [0.0]
    with notifier(f"webhook:{server.url}", clock=lambda: now[0]) as made:
        for minutes, rule in [(0, "a"), (1, "a"), (2, "b"), (9.9, "a"), (10, "a"), (19, "a"), (19.5, "b")]:
            now[0] = minutes * 60
            made.put(alert(rule, step=int(now[0])))
    told = [(body["rule"], body["step"], body["held_back"]) for body in server.bodies()]
    assert told == [
        ("a", 0, {}),
        ("b", 120, {"a": 1}),
        ("a", 600, {"a": 1}),
        ("b", 1170, {"a": 1}),
    ]


def test_what_gets_worse_is_told_at_once(server):
    now = [0.0]
    with notifier(f"webhook:{server.url}", clock=lambda: now[0]) as made:
        for second, severity in enumerate(("warning", "error", "warning", "error")):
            now[0] = float(second)
            made.put(alert("a", second, severity))
        now[0] = 601.0
        made.put(alert("a", 601, "error"))
    told = [(body["step"], body["severity"], body["held_back"]) for body in server.bodies()]
    assert told == [(0, "warning", {}), (1, "error", {}), (601, "error", {"a": 2})]


def test_a_target_hears_at_most_twenty_in_an_hour_and_the_rest_at_the_end(server):
    now = [0.0]
    with notifier(f"webhook:{server.url}", clock=lambda: now[0]) as made:
        for minute in range(59):
            now[0] = minute * 60
            made.put(alert(f"rule-{minute}", step=minute))
        now[0] = 3600.0
        made.put(alert("late", step=60))
        now[0] = 3601.0
        made.put(alert("later", step=61))
    bodies = server.bodies()
    assert [body["step"] for body in bodies] == [*range(20), 60, 61]
    assert sum(bodies[20]["held_back"].values()) == 39
    assert bodies[21]["rule"] == "held-back"
    assert bodies[21]["held_back"] == {"later": 1}


def test_what_was_held_back_last_is_told_at_the_end(server):
    with notifier(f"webhook:{server.url}", clock=lambda: 0.0) as made:
        for step in range(3):
            made.put(alert(step=step))
    first, last = server.bodies()
    assert (first["rule"], first["step"]) == ("loss-spike", 0)
    assert (last["rule"], last["step"], last["held_back"]) == ("held-back", 2, {"loss-spike": 2})
    assert last["message"].startswith("2 alerts did not arrive, or came too close")


def test_the_text_says_what_was_not_sent():
    text = notify.message_of(ALERT, "two\nlines", {"stalled": 2, "lost-updates": 1})
    assert text.title == "halfstep: two lines, step 1200, rank 0: loss-spike (warning)"
    assert text.body.endswith("\nNot sent since the last message: 1 lost-updates, 2 stalled")


@pytest.mark.parametrize(
    ("target", "what", "why"),
    [
        (f"webhook:ftp://{SECRET}/x", "target webhook", "no URL of http or https"),
        (f"webhook:https://me:{SECRET}@host:port/", "target webhook host", "no URL of http or https"),
        (f"webhook:https://host/a b{SECRET}", "target webhook host", "no URL of http or https"),
        ("webhook:", "target webhook", "no URL of http or https"),
        (f"{SECRET}", "target of alerts", "no kind of target"),
        ("webhook:https://host/$NOT_SET_HERE", "environment variable NOT_SET_HERE", "not set"),
        ("webhook:${ALSO_NOT_SET}", "environment variable ALSO_NOT_SET", "not set"),
        ("$HALF_A_TARGET", "target $HALF_A_TARGET", "no kind of target"),
        ("command:", "target command", "no words"),
        (f"command:echo '{SECRET}", "target command", "no words, or a quote"),
        (f"command:no-such-program-here {SECRET}", "target command no-such-program-here", "no such program"),
    ],
)
def test_a_target_that_is_none_is_one_line_without_a_secret(target, what, why, monkeypatch):
    monkeypatch.setenv("HALF_A_TARGET", SECRET)
    with pytest.raises(HalfstepError) as caught:
        target_of(target)
    assert str(caught.value).startswith(f"{what}: ")
    assert why in str(caught.value)
    assert SECRET not in str(caught.value)


def test_an_unknown_service_of_apprise_and_a_missing_apprise_are_one_line(tmp_path, monkeypatch):
    pytest.importorskip("apprise")
    with pytest.raises(HalfstepError, match=r"^target nosuch: apprise does not know such a URL\. ") as caught:
        target_of(f"nosuch://{SECRET}")
    assert SECRET not in str(caught.value)
    (tmp_path / "apprise.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HalfstepError, match=r"apprise is not installed\. .*halfstep\[notify\]"):
        target_of(f"slack://{SECRET}")


def test_secrets_are_nowhere(server, monkeypatch, caplog, capfd):
    monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)
    monkeypatch.setenv("TOKEN", SECRET)
    caplog.set_level(1)
    server.statuses = [500] * 9
    targets = [
        f"webhook:http://me:{SECRET}@127.0.0.1:{server.port}/$TOKEN?key=$TOKEN",
        f"webhook:http://127.0.0.1:1/{SECRET}",
        f"command:{sys.executable} -S -c 'import sys; sys.exit(sys.argv[1])' $TOKEN",
    ]
    with notifier(*targets) as made:
        made.put(ALERT)
    report = send_test(targets)
    assert report.found
    assert [why for _, why in report.faults] == [
        "it answered 500",
        "it could not be reached (Connection refused)",
        "it ended with status 1",
    ]
    out, err = capfd.readouterr()
    everything = "\n".join([out, err, caplog.text, str(report), json.dumps(report.to_dict()), repr(vars(made))])
    assert len(caplog.messages) == 3
    assert SECRET not in everything
    assert "127.0.0.1" in everything


def test_what_cannot_start_a_thread_is_sent_at_the_end(server, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    made = Notifier([f"webhook:{server.url}"], "charlm")
    with monkeypatch.context() as patch:
        patch.setattr(notify.threading.Thread, "start", refuse)
        made.put(alert("a"))
        made.put(alert("b"))
    made.close()
    assert [body["rule"] for body in server.bodies()] == ["a", "b"]


def test_a_fault_of_a_library_does_not_end_the_thread(server, caplog):
    with notifier(f"webhook:{server.url}", pauses_s=()) as made:
        good = made._lines[0]._target
        bad = types.SimpleNamespace(name="bad", send=lambda message, timeout_s: {}[SECRET])
        made._lines[0]._target = bad
        made.put(alert("a"))
        wait_for(lambda: caplog.messages)
        made._lines[0]._target = good
        made.put(alert("b"))
    assert caplog.messages == ["target bad: an alert did not arrive: KeyError"]
    assert server.bodies()[0]["held_back"] == {"a": 1}


@pytest.mark.parametrize("fault", [UnicodeError(SECRET), KeyError(SECRET)])
def test_a_fault_of_a_library_is_in_the_report_of_a_test_message(server, monkeypatch, fault):
    def fail(*_):
        raise fault

    def of(text):
        return types.SimpleNamespace(name="bad", send=fail) if text == "bad" else target_of(text)

    monkeypatch.setattr(notify, "target_of", of)
    report = send_test(["bad", f"webhook:{server.url}"])
    assert report.faults == [("bad", type(fault).__name__), ("webhook 127.0.0.1", None)]


def test_a_host_that_no_name_server_can_know_is_a_line_of_the_report(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    ((_, why),) = send_test([f"webhook:http://{'a' * 70}.invalid/"]).faults
    assert "Unicode" in why


def test_a_command_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    def refuse(pid, signal):
        raise PermissionError

    target = target_of(f"command:{sys.executable} -S -c 'import time; time.sleep(10)'")
    with monkeypatch.context() as patch:
        patch.setattr(targets.subprocess, "Popen", Popen)
        patch.setattr(targets.os, "killpg", refuse)
        with pytest.raises(targets.NotSentError, match="did not end in time"):
            target.send(notify.message_of(ALERT, "r", {}), 0.1)
    (process,) = started
    assert process.poll() is None  # nobody has waited until it ended
    process.kill()
    process.wait()


def test_a_command_that_hangs_is_ended(tmp_path):
    target = target_of(f"command:{sys.executable} -S -c 'import time; time.sleep(60)'")
    with pytest.raises(Exception, match="did not end in time"):
        target.send(notify.message_of(ALERT, "r", {}), 0.2)


def test_the_report_of_a_test_message(server):
    report = send_test([f"webhook:{server.url}"])
    assert not report.found
    assert str(report).splitlines()[0] == "The message arrived at 1 of 1 target."
    assert server.bodies()[0]["rule"] == "test"


SCRIPT = """
import atexit, os, signal, sys, threading
from halfstep.events import Alert
from halfstep.watch.notify import Notifier
alert = lambda rule: Alert(rule, 1, "error", "it ended", "Look.")
first, late = [Notifier([sys.argv[1]], name) for name in ("first", "late")]
first.put(alert("before"))
with first._lines[0]._is_ending._cond:  # a fork takes locks along as they are
    if (pid := os.fork()) == 0:
        signal.alarm(5)
        for notifier in (first, late):
            notifier.put(alert("child"))
            notifier.close()
        [t.join() for t in threading.enumerate() if t is not threading.current_thread()]
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
@atexit.register
def end():
    first.put(alert("at-exit"))
    first.close()
    late.put(alert("late"))
    late.close()
"""


def test_the_end_of_the_interpreter_loses_nothing_and_a_fork_sends_nothing(tmp_path):
    target = writes(tmp_path / "told")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, target], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    rules = [line.split()[0] for line in (tmp_path / "told").read_text().splitlines()]
    assert rules == ["before", "at-exit", "late"]
