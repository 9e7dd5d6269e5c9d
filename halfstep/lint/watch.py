"""Lint again whenever a file changes. Files are looked at, not subscribed to, which works on every file system."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfstep.lint.finding import Finding

SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Change:
    """What changed since the look before. findings: all that stand now. num_files: that are watched."""

    new: Sequence[Finding]
    gone: Sequence[Finding]
    findings: Sequence[Finding]
    num_files: int


def watch(
    look: Callable[[], Mapping[str, Hashable]],
    lint: Callable[[Sequence[str]], Sequence[Finding]],
    wait: Callable[[], None],
) -> Iterator[Change]:
    """Everything at first, and then a :class:`Change` for each look that finds files changed, new or gone. No end.

    look: the files, each with what its findings depend on beside its content. lint: what is in some of them. wait:
    called between looks.
    """
    stamps: dict[str, Hashable] = {}
    found: dict[str, list[Finding]] = {}
    is_first = True
    while True:
        before, stamps = stamps, _stamps(look())
        changed = [file for file, stamp in stamps.items() if before.get(file) != stamp]
        lost = [file for file in before if file not in stamps]
        if changed or lost or is_first:
            old = [finding for file in (*changed, *lost) for finding in found.pop(file, ())]
            now = list(lint(changed)) if changed else []
            for finding in now:
                found.setdefault(finding.file, []).append(finding)
            everything = [finding for file in sorted(found) for finding in found[file]]
            yield Change(_without(now, old), _without(old, now), everything, len(stamps))
        is_first = False
        wait()


def _stamps(files: Mapping[str, Hashable]) -> dict[str, Hashable]:
    stamps: dict[str, Hashable] = {}
    for file, settings in files.items():
        try:
            status = os.stat(file)
        except OSError:
            continue  # it went after it was listed
        stamps[file] = status.st_mtime_ns, status.st_size, settings
    return stamps


def _without(findings: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """The findings that ``others`` do not hold too; a line that only moved makes no new one."""
    left = Counter(map(_identity, others))
    rest = []
    for finding in findings:
        if left[_identity(finding)]:
            left[_identity(finding)] -= 1
        else:
            rest.append(finding)
    return rest


def _identity(finding: Finding) -> tuple[str, int | None, str, str]:
    return finding.file, finding.cell, finding.code, finding.message
