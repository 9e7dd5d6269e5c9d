"""Calls in processes of their own.

A plan patches torch while it runs, and some constructs end the process that meets them on fake tensors, so none runs in
the caller's. The caller needs no torch either: it starts the workers and they import it, side by side.

A worker is ``python -m halfstep.plan.worker``. It reads pickled calls from standard input and writes pickled answers to
standard output; what the user's code prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self

from halfstep.errors import HalfstepError

LIMIT_S = 600.0
"""Seconds that one call may take."""


@dataclass(frozen=True)
class Call:
    """function: ``package.module:name``. It and its arguments have to pickle; ``about`` names it in a message."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    about: str = "a plan"

    def __call__(self) -> Any:
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        gc.freeze()  # what is imported by now stays, so that a collection need not look at it again
        return function(*self.args, **self.kwargs)


class Workers:
    """Processes that run calls, at most ``num`` at once; one for each core by default. To be used as a context.

    computes: whether they compute, with as many threads as torch takes; a plan does not, and gets one.
    """

    def __init__(self, num: int | None = None, limit_s: float = LIMIT_S, *, computes: bool = False) -> None:
        self._num = num or os.cpu_count() or 1
        self._environment = dict(os.environ) if computes else {"OMP_NUM_THREADS": "1", **os.environ}
        self._limit_s = limit_s
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._served: list[threading.Event] = []
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_closed = True  # a thread that still waits for an answer begins nothing new
        for worker in self._all:
            worker.kill()
        for served in self._served:  # each thread reads to the end of what its worker wrote
            served.wait()
        for worker in self._all:
            worker.close()

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The result of each call, or the HalfstepError that it raised or that tells how its process ended."""
        results: list[Any] = [None] * len(calls)
        waiting = list(enumerate(calls))[::-1]
        lock = threading.Lock()

        def serve(served: threading.Event) -> None:
            try:
                while not self._is_closed:
                    with lock:
                        if not waiting:
                            break
                        at, call = waiting.pop()
                    results[at] = self._run(call)
            finally:
                served.set()

        # Events, since a join that Ctrl-C interrupts takes its thread for ended up to Python 3.12.
        self._served = [threading.Event() for _ in range(min(self._num, len(calls)))]
        for served in self._served:
            threading.Thread(target=serve, args=(served,), daemon=True).start()
        for served in self._served:
            while not served.wait(0.1):  # in short waits, so that Ctrl-C is seen at once
                pass
        return results

    def _run(self, call: Call) -> Any:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._environment)
            self._all.append(worker)
            if self._is_closed:
                worker.kill()
        result = worker.run(call, self._limit_s)
        if worker.is_alive:
            self._idle.put(worker)
        return result


class _Worker:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "halfstep.plan.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, call: Call, limit_s: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            pickle.dump(call, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            return self._ended(call, limit_s, timer.finished.is_set())
        finally:
            timer.cancel()

    def _ended(self, call: Call, limit_s: float, is_late: bool) -> HalfstepError:
        status = self._process.wait()
        if is_late:
            return HalfstepError(
                call.about, f"it did not end in {limit_s:g} s", "Plan a smaller model or fewer layers."
            )
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return HalfstepError(
            call.about,
            f"its process ended with {how}{f' ({lines[-1]})' if lines else ''}",
            "The model does something that fake tensors cannot: leave out parts of it until the plan ends.",
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Give back the pipes of a process that has ended, when nobody reads them any more."""
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer calls until there are no more."""
    while True:
        try:
            call: Call = pickle.load(source)
        except EOFError:
            return
        result: Any
        try:
            result = call()
        except HalfstepError as error:
            result = error
        except Exception as error:
            result = HalfstepError(
                call.about, f"{type(error).__name__}: {error}", "Correct the model, or leave that out."
            )
        pickle.dump(result, sink)
        sink.flush()


def main() -> None:
    """The worker process."""
    # What is printed meanwhile must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()  # a plan collects where it says, see fake_step
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
