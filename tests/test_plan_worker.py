"""Processes that run calls: what they give, how they end, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from halfstep.errors import HalfstepError
from halfstep.plan.worker import Call, Workers


@pytest.fixture(scope="module")
def workers():
    with Workers(1) as opened:
        yield opened


def call(function, *args, **more):
    return Call(function, args, about="a try", **more)


def is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


# --- answers -------------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_calls(workers):
    assert workers.run([call("math:sqrt", x) for x in (9.0, 4.0, 1.0)]) == [3.0, 2.0, 1.0]
    assert workers.run([call("builtins:dict", [("a", 1)], kwargs={"b": 2})]) == [{"a": 1, "b": 2}]
    assert workers.run([]) == []


def test_a_process_serves_one_call_after_the_other(workers):
    pids = workers.run([call("os:getpid")] * 3)
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()


def test_calls_run_side_by_side_on_as_many_processes(tmp_path):
    """Each waits for the other: one that opens a pipe to write, and one to read."""
    os.mkfifo(tmp_path / "pipe")
    with Workers(2, limit_s=30.0) as pair:
        results = pair.run([call("os:system", f"echo > {tmp_path}/pipe"), call("os:system", f"cat {tmp_path}/pipe")])
    assert results == [0, 0]


def test_what_is_printed_does_not_get_between_the_answers(workers, capfd):
    results = workers.run([call("builtins:print", "a" * 100_000), call("os:system", "echo b"), call("math:sqrt", 4.0)])
    assert results == [None, 0, 2.0]
    assert capfd.readouterr().out == ""


# --- errors --------------------------------------------------------------------------------------------------------


def test_an_exception_is_a_message_and_the_process_goes_on(workers):
    before = workers.run([call("os:getpid")])
    (error,) = workers.run([call("operator:truediv", 1, 0)])
    assert isinstance(error, HalfstepError)
    assert str(error).startswith("a try: ZeroDivisionError: division by zero.")
    assert workers.run([call("os:getpid")]) == before


def test_our_own_error_comes_as_it_is(workers):
    (error,) = workers.run([call("halfstep.plan.target:target_of", "RTX 3071")])
    assert isinstance(error, HalfstepError)
    assert (error.what, error.why) == ("card 'RTX 3071'", "the catalogue does not hold it")


@pytest.mark.parametrize(
    ("function", "args", "how"),
    [("os:_exit", (3,), "status 3"), ("signal:raise_signal", (int(signal.SIGSEGV),), "signal SIGSEGV")],
)
def test_a_process_that_dies_is_a_message_and_the_next_call_gets_another(workers, function, args, how):
    error, result = workers.run([call(function, *args), call("math:sqrt", 4.0)])
    assert isinstance(error, HalfstepError)
    assert error.what == "a try"
    assert how in error.why
    assert result == 2.0


def test_the_last_words_of_a_process_are_in_the_message(workers):
    (error,) = workers.run([call("os:system", "echo last words >&2; kill -KILL $PPID")])
    assert "signal SIGKILL (last words)" in str(error)


def test_a_call_that_takes_too_long_is_ended():
    with Workers(1, limit_s=2.0) as limited:
        error, result = limited.run([call("time:sleep", 60), call("math:sqrt", 4.0)])
    assert "it did not end in 2 s" in str(error)
    assert result == 2.0


# --- what is left --------------------------------------------------------------------------------------------------


def test_no_process_outlives_its_workers():
    with Workers(1) as opened:
        (pid,) = opened.run([call("os:getpid")])
        assert is_running(pid)
    assert not is_running(pid)


SCRIPT = """
import sys
from halfstep.plan.worker import Call, Workers
with Workers(1) as workers:
    print(workers.run([Call("os:getpid", ())])[0], flush=True)
    workers.run([Call("time:sleep", (60,))])
"""


def test_ctrl_c_ends_the_parent_at_once_and_leaves_no_process():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.send_signal(signal.SIGINT)
        errors = parent.communicate(timeout=20)[1].decode()
    assert errors.strip().endswith("KeyboardInterrupt")
    assert "in thread" not in errors
    assert not is_running(pid)


def test_the_parent_needs_no_torch():
    names = ("worker", "target", "subject", "step_trace", "measure_report")
    imports = "; ".join(f"import halfstep.plan.{name}" for name in names)
    script = f"import sys; {imports}; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("computes", [False, True])
def test_a_plan_takes_one_thread_and_a_measurement_as_many_as_torch_does(computes, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Workers(1, computes=computes) as opened:
        assert opened.run([call("os:getenv", "OMP_NUM_THREADS")]) == [None if computes else "1"]
