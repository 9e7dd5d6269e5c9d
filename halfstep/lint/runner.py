"""Lint many files: what is known from before is not read again, and the rest is shared out among processes."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.lint.cache import Cache
from halfstep.lint.catalogue import LINT_FAILED, catalogue
from halfstep.lint.document import cannot_parse, lint_bytes, lint_failed
from halfstep.lint.finding import Finding
from halfstep.lint.rule import Rule

MIN_PARALLEL_BYTES = 400_000
"""Less source than this is linted before processes have started."""
BATCH_BYTES = 60_000
"""What a process gets at a time. Small, so that all of them end at the same time."""

Job = tuple[str, Collection[str]]
"""A file and the codes of the rules to look for. Rules themselves hold functions, which do not travel."""
Answer = tuple[str, str | None, list[Finding]]
"""A file, the key of its content in the cache if it is to be kept, and what was found."""


@dataclass(frozen=True)
class Result:
    """findings: in the order of files and lines. num_cached: how many of ``num_files`` were known from before."""

    findings: tuple[Finding, ...]
    num_files: int
    num_cached: int = 0


def lint_files(
    files: Mapping[str, Collection[str]], cache: Cache | None = None, processes: int | None = None
) -> Result:
    """What is found in each of ``files`` by the rules with its codes.

    A file that cannot be read or parsed is one finding, HS000; what fails of ours on a file is one, HS002. Neither ends
    the run. processes: at most so many; None for one a core. They are spawned: a script calls this beneath
    ``if __name__ == "__main__"``. An interrupt ends them and is raised again.
    """
    found: dict[str, list[Finding]] = {}
    if cache:
        for file, codes in files.items():
            if (known := _known(file, codes, cache)) is not None:
                found[file] = known
    num_cached = len(found)
    jobs = [(file, codes) for file, codes in files.items() if file not in found]
    with closing(_answers(jobs, processes or _num_cores())) as answers:
        for file, key, findings in answers:
            found[file] = findings
            if cache and key:
                cache.add(key, findings)
    if cache:
        cache.save()
    return Result(tuple(finding for file in files for finding in found[file]), len(files), num_cached)


def _known(file: str, codes: Collection[str], cache: Cache) -> list[Finding] | None:
    try:
        return cache.find(cache.key(Path(file).read_bytes(), file, codes))
    except OSError:
        return None  # linting it says why


def _answers(jobs: Sequence[Job], processes: int) -> Generator[Answer, None, None]:
    batches = list(_batches(jobs))
    processes = min(processes, len(batches))
    if processes == 1 or sum(_size(file) for file, _ in jobs) < MIN_PARALLEL_BYTES:
        yield from _lint_batch(jobs)
        return
    lost: list[Job] = []
    with _pool(processes) as pool:
        futures: dict[Future[list[Answer]], list[Job]] = {}
        for batch in batches:
            try:
                futures[pool.submit(_lint_batch, batch)] = batch
            except BrokenProcessPool:
                lost += batch
        for future in as_completed(futures):
            try:
                yield from future.result()
            except BrokenProcessPool:  # a process crashed or was killed: nobody knows over which file
                lost += futures[future]
    if lost:
        yield from _one_by_one(lost)


def _one_by_one(jobs: Sequence[Job]) -> Iterator[Answer]:
    """Each job in a process of its own, so that the file that ends its process is found."""
    if _alone([]) is None:
        raise HalfstepError(
            "processes of the linter",
            "they end before they have begun",
            'Call lint_files beneath if __name__ == "__main__", or with processes=1.',
        )
    for job in jobs:
        yield from _alone([job]) or [(job[0], None, [lint_failed(job[0], "the linter", "its process ended")])]


def _alone(jobs: Sequence[Job]) -> list[Answer] | None:
    """The answers of a process that does nothing else; None if it ended before it answered."""
    with _pool(1) as pool:
        try:
            return pool.submit(_lint_batch, jobs).result()
        except BrokenProcessPool:
            return None


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with the block; when it is left by an exception, at once."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Prepares a worker: an interrupt is the caller's to handle, and no worker outlives a caller that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_caller() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_caller, daemon=True).start()
    gc.set_threshold(200_000)  # syntax trees are many objects and few cycles


def _lint_batch(jobs: Sequence[Job]) -> list[Answer]:
    return [_lint_file(file, frozenset(codes)) for file, codes in jobs]


def _lint_file(file: str, codes: frozenset[str]) -> Answer:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        return file, None, [cannot_parse(file, error)]
    try:
        findings = lint_bytes(content, file, _rules(codes))
    except Exception as error:
        findings = [lint_failed(file, "the linter", f"{type(error).__name__}: {error}")]
    is_sure = all(finding.code != LINT_FAILED.code for finding in findings)
    return file, Cache.key(content, file, codes) if is_sure else None, findings


@lru_cache
def _rules(codes: frozenset[str]) -> tuple[Rule, ...]:
    return tuple(rule for code, rule in catalogue().items() if code in codes)


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += _size(job[0])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
