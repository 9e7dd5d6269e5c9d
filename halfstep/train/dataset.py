"""The examples that a task trains on: read, checked as a whole, and a share of them held out."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError, and_more
from halfstep.train import builtin
from halfstep.train.forms import TASKS, Checker, Row
from halfstep.train.records import find, read_jsonl, read_text

if TYPE_CHECKING:
    from datasets import Dataset

HELD_OUT = 0.05
"""The share of the examples that is kept for evaluation."""

_BATCH = 256  # rows


@dataclass(frozen=True)
class Data:
    """Examples in the columns that TRL's trainers take, each with ``line``, where it stands (``chats.jsonl:17``).

    ``columns`` are those columns without ``line``, of text or, if ``is_conversational``, of messages. ``evaluation`` is
    None when nothing is held out. ``notes`` are sentences that the user should read. ``digest`` names what the examples
    say, in whatever file they stand.
    """

    task: str
    source: str
    train: Dataset
    evaluation: Dataset | None
    columns: tuple[str, ...]
    is_conversational: bool
    notes: tuple[str, ...] = ()
    digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "source": self.source,
            "columns": list(self.columns),
            "is_conversational": self.is_conversational,
            "num_train": len(self.train),
            "num_evaluation": len(self.evaluation) if self.evaluation is not None else 0,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        held_out = len(self.evaluation) if self.evaluation is not None else "none"
        form = " + ".join(self.columns)
        if self.is_conversational and self.columns != ("messages",):
            form += " in messages"
        num = len(self.train)
        return f"{self.source}: {num} {'example' if num == 1 else 'examples'} of {form}, {held_out} held out"

    def texts(self) -> Iterator[str]:
        """Every text that is trained on, in order; what a tokenizer is trained on."""
        for row in self.train:
            for column in self.columns:
                value = row[column]
                if isinstance(value, str):
                    yield value
                elif isinstance(value, list):
                    yield from (message["content"] for message in value)


def read(task: str, data: str, held_out: float = HELD_OUT, seed: int = 0) -> Data:
    """What ``task`` (pretrain, sft, dpo, kto) trains on, all of it checked.

    ``data`` is ``builtin``, a FILE.jsonl, a DIR of such files or, for pretraining, text. The share ``held_out`` of it,
    chosen by ``seed``, is for evaluation. HalfstepError in one line, with the file and the line, for whatever cannot be
    trained on.
    """
    assert task in TASKS, task
    if not 0 <= held_out < 1:
        raise HalfstepError(f"held_out={held_out:g}", "it is a share of the examples, from 0 to below 1", "Use 0.05.")
    if data == builtin.SOURCE:
        records = ((record, line, line, group) for record, line, group in builtin.rows(task))
        table, checker, groups, digest = _collect(task, records, data)
    else:
        table, checker, groups, digest = _collect(task, _rows_of(task, data), data)
    notes = _notes(checker)
    chosen = _held_out(groups, held_out, seed)
    if held_out and not chosen:
        are = "1 example is" if len(table) == 1 else f"{len(table)} examples are"
        notes.append(f"{are} too few to hold some out: nothing is evaluated.")
    train, evaluation = table, None
    if chosen:
        train = table.select([place for place in range(len(table)) if place not in chosen])
        evaluation = table.select(sorted(chosen))
    return Data(task, data, train, evaluation, checker.columns, checker.is_conversational, tuple(notes), digest)


def _held_out(groups: array[int], share: float, seed: int) -> set[int]:
    """Places of rows; those of one group stay together."""
    names = sorted(set(groups))
    kept = set(random.Random(seed).sample(names, int(len(names) * share)))
    return {place for place, group in enumerate(groups) if group in kept}


def _rows_of(task: str, data: str) -> Iterator[tuple[object, str, str, int]]:
    """Of each record: itself, where it stands for a message, and for its row; the group that is held out together."""
    files = find(task, data)
    num_bytes = sum(file.stat().st_size for file in files)
    group = -1
    for file in files:
        if file.suffix == ".jsonl":
            lines: Iterable[tuple[int, Any]] = read_jsonl(file)
        else:
            lines = ((number, {"text": text}) for number, text in read_text(file, num_bytes) if text.strip())
        for number, record in lines:
            group += 1
            yield record, f"{file} line {number}", f"{file}:{number}", group


def _collect(
    task: str, records: Iterable[tuple[object, str, str, int]], source: str
) -> tuple[Dataset, Checker, array[int], str]:
    """The rows of all records, once, as Arrow, the group of each, and a digest of what they say."""
    import pyarrow as pa
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint

    checker, batches, groups = Checker(task), [], array("q")
    batch: list[Row] = []
    digest = hashlib.blake2b(digest_size=16)

    def take() -> None:
        said = pa.RecordBatch.from_pylist(batch, _schema(checker))
        digest.update(said.drop_columns(["line"]).serialize())
        batches.append(said)

    for record, where, line, group in records:
        rows = checker.rows(record, where)
        groups.extend([group] * len(rows))
        batch += [row | {"line": line} for row in rows]
        if len(batch) >= _BATCH:
            take()
            batch = []
    if not groups:
        raise HalfstepError(f"data {source}", "it is empty", "Give data with at least one example.")
    if batch:
        take()
    # Without a fingerprint it pickles the whole table to make one of it.
    table = Dataset(pa.Table.from_batches(batches), fingerprint=generate_random_fingerprint())
    return table, checker, groups, digest.hexdigest()


def _schema(checker: Checker) -> Any:
    import pyarrow as pa

    message = pa.struct({"role": pa.string(), "content": pa.string()})
    text = pa.list_(message) if checker.is_conversational else pa.string()
    columns = {column: pa.bool_() if column == "label" else text for column in checker.columns}
    return pa.schema(columns | {"line": pa.string()})


def _notes(checker: Checker) -> list[str]:
    notes = []
    if checker.unused:
        notes.append(f"Columns that are not used: {and_more(sorted(checker.unused))}.")
    if checker.num_alike:
        pairs = "1 pair has" if checker.num_alike == 1 else f"{checker.num_alike} pairs have"
        notes.append(f"{pairs} the same chosen and rejected answer, which teaches nothing.")
    if "label" in checker.columns and not (checker.num_good and checker.num_bad):
        kind, lacking = ("good", "bad") if checker.num_good else ("bad", "good")
        notes.append(f"Every completion is labelled {kind}: without {lacking} ones KTO has nothing to tell apart.")
    return notes
