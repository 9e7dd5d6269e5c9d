"""Lint many files, each in a process of its own kind where that pays, with what was found before."""

from __future__ import annotations

import ast
import codecs
import contextlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import tokenize
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.lint.cache import Cache
from halfstep.lint.catalogue import catalogue
from halfstep.lint.check import check_source
from halfstep.lint.finding import Finding
from halfstep.lint.notebook import Notebook, read_notebook
from halfstep.lint.rule import Rule
from halfstep.lint.suppress import suppress

CANNOT_PARSE = "HS000", "cannot-parse"
LINT_FAILED = "HS002", "lint-failed"
REPORT_IT = "Please report it with the file."
MIN_PARALLEL_BYTES = 400_000
"""Less than this is linted sooner than processes have started."""
BATCH_BYTES = 100_000
"""About a tenth of a second: an interrupt and the slowest process are waited for no longer than that."""


@dataclass(frozen=True)
class Result:
    """What stands in ``num_files`` files, in their order; ``num_cached`` of them did not have to be read anew."""

    findings: tuple[Finding, ...]
    num_files: int
    num_cached: int = 0


def lint_files(
    files: Mapping[str, Collection[str]], cache: Cache | None = None, processes: int | None = None
) -> Result:
    """Look into each of ``files`` for the rules with its codes.

    A file that cannot be read or parsed is one finding, HS000; a rule that fails on a file is one, HS002.
    processes: at most so many; None for as many as this process may use cores. They are spawned, so a script that calls
    this does so beneath ``if __name__ == "__main__"``. An interrupt ends them.
    """
    found: dict[str, list[Finding]] = {}
    missing = []
    for file, codes in files.items():
        known = cache.find(cache.key(_bytes_of(file), file, codes)) if cache else None
        if known is None:
            missing.append(file)
        else:
            found[file] = known
    num_cached = len(found)
    for file, key, findings in _lint_all({file: files[file] for file in missing}, processes or _num_cores()):
        found[file] = findings
        if cache and not any(finding.code == LINT_FAILED[0] for finding in findings):
            cache.add(key, findings)
    if cache:
        cache.save()
    return Result(tuple(finding for file in files for finding in found[file]), len(files), num_cached)
