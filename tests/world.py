"""Ranks for tests: processes that torchrun started once, and that run one function after another, all at once.

def job(factor): ...                 # a function of a test module, run by every rank of an open gloo group

def test(world2): assert world2.run(job, 3.0) == [..., ...]      # what it returned, by rank
"""

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent


class World:
    """``num`` ranks. A job that fails on a rank, or hangs, ends them; the next one starts them anew."""

    def __init__(self, num):
        self.num = num
        self._process = None

    def run(self, function, *args, timeout=90):
        """Results of ``function(*args)`` by rank; it and its results have to be picklable, as an import is."""
        if self._process is None:
            self._start()
        self._job += 1
        job = pickle.dumps((function.__module__, function.__qualname__, args))
        _write(self._folder / f"job-{self._job}", job)
        paths = [self._folder / f"result-{self._job}-{rank}" for rank in range(self.num)]
        failure, end = None, time.monotonic() + timeout
        while failure is None and not all(path.exists() for path in paths):
            time.sleep(0.003)
            failed = [path for path in paths if path.exists() and pickle.loads(path.read_bytes())[1]]
            if failed or self._process.poll() is not None or time.monotonic() > end:
                failure = "failed" if failed else "died" if self._process.poll() is not None else "hung"
                time.sleep(0.2)  # for the others to say something too
        results = [pickle.loads(path.read_bytes()) if path.exists() else (None, "no answer") for path in paths]
        if failure or any(error for _, error in results):
            stacks = self.close(dump=True)
            said = "\n".join(f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error)
            raise AssertionError(f"{function.__qualname__} {failure or 'failed'}\n{said}\n{stacks}")
        return [result for result, _ in results]

    def _start(self):
        self._folder = Path(tempfile.mkdtemp(prefix="world-"))
        self._job = 0
        environment = {
            **os.environ,
            "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "WORLD_STARTER": str(os.getpid()),
        }
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num}"]
        with (self._folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *launch, str(HERE / "world.py"), str(self._folder)],
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def close(self, dump=False):
        """End the ranks; what they printed last, with a stack of each if ``dump``."""
        if self._process is None:
            return ""
        ranks = [int(path.read_text()) for path in self._folder.glob("pid-*")]
        if dump:
            for pid in ranks:
                _kill(os.kill, pid, signal.SIGUSR1)
            time.sleep(0.2)
        _kill(os.killpg, self._process.pid, signal.SIGKILL)
        for pid in ranks:  # they have sessions of their own
            _kill(os.kill, pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        return (self._folder / "output").read_text()[-6000:]


def _kill(kill, pid, number):
    with contextlib.suppress(ProcessLookupError):
        kill(pid, number)


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _write(path, data):
    """Whole or not at all, since the others are waiting for it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.rename(path)


def serve(folder):
    """One rank: run the jobs that come, until torchrun has gone, or who started it."""
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    rank, parent, starter = int(os.environ["RANK"]), os.getppid(), int(os.environ["WORLD_STARTER"])
    _write(folder / f"pid-{rank}", str(os.getpid()).encode())
    torch.distributed.init_process_group("gloo")
    number, since = 1, time.monotonic()
    while os.getppid() == parent and _lives(starter):
        path = folder / f"job-{number}"
        if not path.exists():
            # Ranks without a job for long look less often: other tests need the cores.
            time.sleep(min(0.1, max(0.003, (time.monotonic() - since) / 50)))
            continue
        module, name, args = pickle.loads(path.read_bytes())
        torch.manual_seed(0)
        try:
            result = (getattr(importlib.import_module(module), name)(*args), None)
        except BaseException:
            result = (None, traceback.format_exc())
        _write(folder / f"result-{number}-{rank}", pickle.dumps(result))
        number, since = number + 1, time.monotonic()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
