"""The forms that records of a task may have, and what is wrong with one that has another: pure values, no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfstep.errors import HalfstepError, and_more

TASKS = ("pretrain", "sft", "dpo", "kto")

Row = dict[str, Any]
"""What a trainer of TRL takes: columns of text, or of messages {"role", "content"}; ``label`` is a bool."""

ROLES = ("system", "user", "assistant", "tool")
_SHARE_GPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_ONE_MESSAGE = '{"role": "user", "content": "..."}'


@dataclass(frozen=True)
class Form:
    """``columns`` that a record has in this form, others that it may have, and how rows are made of it."""

    columns: tuple[str, ...]
    rows: Callable[[Row, str], list[Row]]
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join(self.columns)

    def fits(self, record: Row) -> bool:
        return all(column in record for column in self.columns)


class Checker:
    """Turns the records of one data set into rows, all of one kind; a HalfstepError names the line at fault.

    ``unused`` are the columns that no row was made of, and ``num_alike`` the pairs whose two answers are the same text.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self.columns: tuple[str, ...] = ()
        self.is_conversational = False
        self.unused: set[str] = set()
        self.num_alike = 0
        self.num_good = self.num_bad = 0
        self._first = ""

    def rows(self, record: object, where: str) -> list[Row]:
        """The rows of a record that stands at ``where``, checked."""
        if not isinstance(record, dict):
            raise HalfstepError(where, f"it is {_kind(record)}, not an object", f"Write {_example(self.task)}.")
        form = self._form_of(record, where)
        rows = form.rows(record, where)
        self.unused |= record.keys() - {*form.columns, *form.optional}
        for row in rows:
            self._take(row, where)
        return rows

    def _form_of(self, record: Row, where: str) -> Form:
        columns = and_more([repr(column) for column in record]) or "no columns"
        judged = next((task for task in ("dpo", "kto") if any(form.fits(record) for form in FORMS[task])), None)
        if self.task == "sft" and judged:
            # Trained on as they stand, the answers that somebody judged to be bad would be learned as well.
            raise HalfstepError(where, f"its {columns} are judged answers", f"Use halfstep train {judged}.")
        for form in FORMS[self.task]:
            if form.fits(record):
                return form
        others = [task for task in TASKS if any(form.fits(record) for form in FORMS[task])]
        takes = " or ".join(str(form) for form in FORMS[self.task])
        fix = f"They fit halfstep train {' and '.join(others)}." if others else f"Write {_example(self.task)}."
        raise HalfstepError(where, f"it has {columns}, and {self.task} takes {takes}", fix)

    def _take(self, row: Row, where: str) -> None:
        columns, is_conversational = tuple(row), any(isinstance(value, list) for value in row.values())
        if not self._first:
            self._first, self.columns, self.is_conversational = where, columns, is_conversational
        elif (columns, is_conversational) != (self.columns, self.is_conversational):
            here, there = _said(columns, is_conversational), _said(self.columns, self.is_conversational)
            fix = "Write all records in one form, or train on them one after the other."
            raise HalfstepError(where, f"it is {here}, where {self._first} is {there}", fix)
        self.num_alike += "chosen" in row and row["chosen"] == row["rejected"]
        if "label" in row:
            self.num_good += row["label"]
            self.num_bad += not row["label"]


def _said(columns: tuple[str, ...], is_conversational: bool) -> str:
    if columns == ("messages",):
        return "messages"
    return f"{' + '.join(columns)} of {'messages' if is_conversational else 'text'}"


def _kind(value: object) -> str:
    """A value of JSON in the words of JSON, short enough for a message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    for kind, word in ((str, "text"), (int, "number"), (float, "number"), (list, "list"), (dict, "object")):
        if isinstance(value, kind):
            text = f"the {word} {str(value)[:20]!r}" if kind is str else f"the {word} {str(value)[:20]}"
            return text if kind in (str, int, float) else f"{'an' if kind is dict else 'a'} {word}"
    raise AssertionError(type(value))


def _example(task: str) -> str:
    return {
        "pretrain": '{"text": "..."}',
        "sft": '{"prompt": "...", "completion": "..."}',
        "dpo": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
        "kto": '{"prompt": "...", "completion": "...", "label": true}',
    }[task]


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise HalfstepError(where, f"{name} is {_kind(value)}, not text", "Write a text there, or leave the line out.")
    if not value.strip():
        raise HalfstepError(where, f"{name} is empty", "Write a text there, or leave the line out.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON may hold one as \ud83d; Arrow and every tokenizer take UTF-8.
        half = f"\\u{ord(value[error.start]):x}"
        why = f"{name} has the half character {half} at {error.start}, which UTF-8 cannot hold"
        raise HalfstepError(where, why, "Write both halves, or leave it out.") from None
    return value


def _messages(value: object, name: str, where: str, role: str = "role", content: str = "content") -> list[Row]:
    if not isinstance(value, list):
        raise HalfstepError(where, f"{name} is {_kind(value)}, not a list of messages", f"Write [{_ONE_MESSAGE}].")
    if not value:
        raise HalfstepError(where, f"{name} has no messages", "Write some there, or leave the line out.")
    roles = _SHARE_GPT if role == "from" else {role: role for role in ROLES}
    messages = []
    for number, message in enumerate(value, 1):
        place = f"message {number} of {name}"
        if not isinstance(message, dict) or not {role, content} <= message.keys():
            it = and_more([repr(key) for key in message]) if isinstance(message, dict) else _kind(message)
            raise HalfstepError(where, f"{place} is {it}", f'It needs "{role}" and "{content}".')
        if not isinstance(message[role], str) or message[role] not in roles:
            raise HalfstepError(where, f"{place} has as {role} {_kind(message[role])}", f"Use {' or '.join(roles)}.")
        if extra := message.keys() - {role, content}:
            # A call of a tool that is left out in silence would teach the model not to call it.
            why = f"{place} has {and_more(sorted(repr(key) for key in extra))}"
            raise HalfstepError(where, why, f'halfstep train takes "{role}" and "{content}" alone.')
        text = _text(message[content], f"{content} of {place}", where)
        messages.append({"role": roles[message[role]], "content": text})
    return messages


def _either(record: Row, names: tuple[str, ...], where: str) -> Row:
    """The columns as text, or, if the first of them is a list, as messages that begin with the right role."""
    if not isinstance(record[names[0]], list):
        return {name: _text(record[name], name, where) for name in names}
    row = {name: _messages(record[name], name, where) for name in names}
    for name in names:
        expected, place = (("user", "tool"), -1) if name == "prompt" else (("assistant",), 0)
        if row[name][place]["role"] not in expected:
            end = "begins" if place == 0 else "ends"
            why = f"{name} {end} with a message of the {row[name][place]['role']}"
            raise HalfstepError(where, why, f"It {end} with one of the {expected[0]}.")
    return row


def _conversation(messages: list[Row], name: str, where: str) -> list[Row]:
    if not any(message["role"] == "assistant" for message in messages):
        raise HalfstepError(where, f"{name} has no message of the assistant", "Add the answer that is to be learned.")
    return [{"messages": messages}]


def _of_text(record: Row, where: str) -> list[Row]:
    return [{"text": _text(record["text"], "text", where)}]


def _of_messages(record: Row, where: str) -> list[Row]:
    return _conversation(_messages(record["messages"], "messages", where), "messages", where)


def _of_conversations(record: Row, where: str) -> list[Row]:
    messages = _messages(record["conversations"], "conversations", where, "from", "value")
    return _conversation(messages, "conversations", where)


def _of_completion(record: Row, where: str) -> list[Row]:
    return [_either(record, ("prompt", "completion"), where)]


def _of_instruction(record: Row, where: str) -> list[Row]:
    return [_instructed(record["instruction"], record.get("input"), record["output"], where)]


def _of_instances(record: Row, where: str) -> list[Row]:
    instances = record["instances"]
    if not isinstance(instances, list) or not instances:
        it = _kind(instances) if instances != [] else "empty"
        raise HalfstepError(where, f"instances is {it}", 'Write [{"input": "...", "output": "..."}].')
    rows = []
    for number, instance in enumerate(instances, 1):
        if not isinstance(instance, dict) or "output" not in instance:
            raise HalfstepError(where, f"instance {number} has no output", 'It needs "input" and "output".')
        rows.append(_instructed(record["instruction"], instance.get("input"), instance["output"], where))
    return rows


def _instructed(instruction: object, given: object, output: object, where: str) -> Row:
    """Alpaca's prompt, without its preface. It ends with a line end, so that no token spans prompt and completion."""
    parts = ["### Instruction:", _text(instruction, "instruction", where).strip()]
    if given not in (None, ""):
        parts += ["", "### Input:", _text(given, "input", where).strip()]
    prompt = "\n".join([*parts, "", "### Response:", ""])
    return {"prompt": prompt, "completion": _text(output, "output", where).strip()}


def _of_pair(record: Row, where: str) -> list[Row]:
    return [_either(record, ("prompt", "chosen", "rejected"), where)]


def _of_implicit_pair(record: Row, where: str) -> list[Row]:
    """A pair that holds its prompt twice: as the messages that both begin with, or as the words."""
    chosen, rejected = record["chosen"], record["rejected"]
    if not isinstance(chosen, list):
        chosen, rejected = _text(chosen, "chosen", where), _text(rejected, "rejected", where)
        length = _num_shared(chosen, rejected)
        while length > 0 and not chosen[length : length + 1].isspace():
            length -= 1  # a word belongs to the answers as a whole
    else:
        chosen, rejected = _messages(chosen, "chosen", where), _messages(rejected, "rejected", where)
        length = _num_shared(chosen, rejected)
    if not length:
        raise HalfstepError(where, "there is no prompt, and chosen and rejected begin differently", "Add a prompt.")
    row = {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}
    if not row["chosen"] or not row["rejected"]:
        raise HalfstepError(where, "one answer is the beginning of the other", "Add a prompt, or leave the line out.")
    return [_either(row, ("prompt", "chosen", "rejected"), where)]


def _num_shared(left: Any, right: Any) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (mine, other) in pairs if mine != other), min(len(left), len(right)))


def _of_judgement(record: Row, where: str) -> list[Row]:
    label = record["label"]
    if not (isinstance(label, bool) or (type(label) is int and label in (0, 1))):
        raise HalfstepError(where, f"label is {_kind(label)}", "Write true for a good completion, false for a bad one.")
    return [_either(record, ("prompt", "completion"), where) | {"label": bool(label)}]


FORMS: dict[str, tuple[Form, ...]] = {
    "pretrain": (Form(("text",), _of_text),),
    "sft": (
        Form(("messages",), _of_messages),
        Form(("conversations",), _of_conversations),
        Form(("prompt", "completion"), _of_completion),
        Form(("instruction", "instances"), _of_instances),
        Form(("instruction", "output"), _of_instruction, ("input",)),
        Form(("text",), _of_text),
    ),
    "dpo": (
        Form(("prompt", "chosen", "rejected"), _of_pair),
        Form(("chosen", "rejected"), _of_implicit_pair),
    ),
    "kto": (Form(("prompt", "completion", "label"), _of_judgement),),
}
"""Of each task, the first that fits a record is its form."""
