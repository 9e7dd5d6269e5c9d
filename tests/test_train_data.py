"""The forms of the examples, what is said of a line that has none of them, and what is held out."""

import json

import pytest

from halfstep.errors import HalfstepError
from halfstep.train.dataset import read
from halfstep.train.forms import FORMS, TASKS

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
OTHER = {"role": "assistant", "content": "go away"}
SFT = {"prompt": "2 + 2 = ", "completion": "4"}
DPO = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
KTO = SFT | {"label": True}


def write(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes records to data.jsonl in the current folder, so that messages are the same everywhere."""
    monkeypatch.chdir(tmp_path)
    return lambda *records: write(tmp_path / "data.jsonl", *records) and "data.jsonl"


def rows(data):
    return [{name: row[name] for name in data.columns} for row in data.train]


@pytest.mark.parametrize(
    ("task", "record", "expected"),
    [
        ("pretrain", {"text": "once"}, {"text": "once"}),
        ("sft", {"text": "once"}, {"text": "once"}),
        ("sft", SFT, SFT),
        ("sft", {"prompt": [USER], "completion": [ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}),
        ("sft", {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
        (
            "sft",
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            {"messages": [USER, ANSWER]},
        ),
        (
            "sft",
            {"instruction": "Add.", "input": "2, 3", "output": " 5\n"},
            {"prompt": "### Instruction:\nAdd.\n\n### Input:\n2, 3\n\n### Response:\n", "completion": "5"},
        ),
        (
            "sft",
            {"instruction": "Greet.", "input": "", "output": "hi"},
            {"prompt": "### Instruction:\nGreet.\n\n### Response:\n", "completion": "hi"},
        ),
        (
            "sft",
            {"instruction": "Greet.", "instances": [{"input": "", "output": "hi"}]},
            {"prompt": "### Instruction:\nGreet.\n\n### Response:\n", "completion": "hi"},
        ),
        ("dpo", DPO, DPO),
        (
            "dpo",
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        ),
        (
            "dpo",
            {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        ),
        (
            "dpo",
            {"chosen": "Q: why? A: I can", "rejected": "Q: why? A: I cannot"},
            {"prompt": "Q: why? A: I", "chosen": " can", "rejected": " cannot"},
        ),
        ("kto", KTO, KTO),
        ("kto", SFT | {"label": 0}, SFT | {"label": False}),
        (
            "kto",
            {"prompt": [USER], "completion": [OTHER], "label": False},
            {"prompt": [USER], "completion": [OTHER], "label": False},
        ),
    ],
)
def test_a_record_becomes_the_columns_that_trl_takes(task, record, expected, file):
    data = read(task, file(record))
    assert rows(data) == [expected]
    assert data.columns == tuple(expected)
    assert data.is_conversational == any(isinstance(value, list) for value in expected.values())
    assert data.train["line"][0] == "data.jsonl:1"


def test_every_instance_of_an_instruction_is_an_example(file):
    instances = [{"input": str(number), "output": f"n{number}"} for number in range(3)]
    data = read("sft", file({"instruction": "Name it.", "instances": instances}))
    assert [row["completion"] for row in data.train] == ["n0", "n1", "n2"]
    assert data.train["line"][:] == ["data.jsonl:1"] * 3


def message(task, *records, file):
    with pytest.raises(HalfstepError) as caught:
        read(task, file(*records))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("task", "record", "expected"),
    [
        ("sft", ["hi"], "it is a list, not an object"),
        ("sft", None, "it is null, not an object"),
        ("sft", "hi", "it is the text 'hi', not an object"),
        ("sft", DPO, "'prompt', 'chosen', 'rejected' are judged answers. Use halfstep train dpo"),
        ("sft", KTO, "'prompt', 'completion', 'label' are judged answers. Use halfstep train kto"),
        ("dpo", SFT, "it has 'prompt', 'completion', and dpo takes prompt + chosen + rejected or chosen + rejected"),
        ("dpo", SFT, "They fit halfstep train sft."),
        ("dpo", KTO, "They fit halfstep train sft and kto."),
        ("kto", DPO, "They fit halfstep train dpo."),
        ("kto", {"text": "once"}, "They fit halfstep train pretrain and sft."),
        ("pretrain", {"messages": [USER, ANSWER]}, "They fit halfstep train sft."),
        ("pretrain", {"question": "a", "answer": "b"}, 'and pretrain takes text. Write {"text": "..."}.'),
        ("sft", {}, "it has no columns"),
        ("sft", {"a": 1, "b": 2, "c": 3, "d": 4}, "it has 'a', 'b', 'c' and 1 more"),
        ("pretrain", {"text": None}, "text is null, not text"),
        ("pretrain", {"text": 7}, "text is the number 7, not text"),
        ("pretrain", {"text": {"a": 1}}, "text is an object, not text"),
        ("pretrain", {"text": " \n"}, "text is empty"),
        ("pretrain", {"text": "a\ud83d"}, "text has the half character \\ud83d at 1"),
        ("sft", SFT | {"completion": ""}, "completion is empty"),
        ("sft", SFT | {"completion": [ANSWER]}, "completion is a list, not text"),
        ("sft", SFT | {"prompt": [USER]}, "completion is the text '4', not a list of messages"),
        ("sft", {"instruction": "a", "output": 5}, "output is the number 5, not text"),
        ("sft", {"instruction": "a", "instances": []}, "instances is empty"),
        ("sft", {"instruction": "a", "instances": [{"input": "b"}]}, "instance 1 has no output"),
        ("sft", {"messages": []}, "messages has no messages"),
        ("sft", {"messages": [USER]}, "messages has no message of the assistant"),
        ("sft", {"messages": [USER, "hello"]}, "message 2 of messages is the text 'hello'"),
        ("sft", {"messages": [{"role": "user", "text": "a"}]}, "message 1 of messages is 'role', 'text'"),
        ("sft", {"messages": [{"role": "robot", "content": "a"}]}, "has as role the text 'robot'. Use system or user"),
        (
            "sft",
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "content of message 2 of messages is null",
        ),
        ("sft", {"messages": [USER, ANSWER | {"tool_calls": []}]}, "message 2 of messages has 'tool_calls'"),
        ("sft", {"prompt": [ANSWER], "completion": [ANSWER]}, "prompt ends with a message of the assistant"),
        ("sft", {"prompt": [USER], "completion": [USER]}, "completion begins with a message of the user"),
        ("dpo", {"chosen": "yes", "rejected": "no"}, "there is no prompt, and chosen and rejected begin differently"),
        ("dpo", {"chosen": [USER, ANSWER], "rejected": [USER]}, "one answer is the beginning of the other"),
        ("kto", KTO | {"label": "true"}, "label is the text 'true'. Write true for a good completion"),
        ("kto", KTO | {"label": 2}, "label is the number 2"),
        ("kto", KTO | {"label": 1.0}, "label is the number 1.0"),
        ("kto", KTO | {"label": None}, "label is null"),
    ],
)
def test_an_error_names_the_line_and_what_is_wrong(task, record, expected, file):
    good = {"pretrain": {"text": "once"}, "sft": SFT, "dpo": DPO, "kto": KTO}[task]
    text = message(task, good, record, file=file)
    assert text.startswith("data.jsonl line 2: ")
    assert expected in text


def test_one_data_set_has_one_form(file):
    text = message("sft", SFT, {"messages": [USER, ANSWER]}, file=file)
    assert "line 2: it is messages, where data.jsonl line 1 is prompt + completion of text" in text
    text = message("sft", SFT, {"prompt": [USER], "completion": [ANSWER]}, file=file)
    assert "it is prompt + completion of messages" in text
    mixed = read("sft", file(SFT, {"instruction": "Add 2 and 2.", "output": "4"}))  # two forms, the same columns
    assert len(mixed.train) == 2


def test_notes_say_what_teaches_nothing(file):
    assert read("kto", file(KTO, KTO), held_out=0).notes == (
        "Every completion is labelled good: without bad ones KTO has nothing to tell apart.",
    )
    assert "labelled bad" in read("kto", file(KTO | {"label": False}), held_out=0).notes[0]
    assert read("kto", file(KTO, KTO | {"label": False}), held_out=0).notes == ()
    (note,) = read("dpo", file(DPO, DPO | {"rejected": "4"}), held_out=0).notes
    assert note == "1 pair has the same chosen and rejected answer, which teaches nothing."
    (note,) = read("sft", file(SFT | {"id": 1}, SFT | {"by": "me"}), held_out=0).notes
    assert note == "Columns that are not used: by, id."


def test_a_share_is_held_out_and_stays_the_same(file):
    name = file(*({"text": f"text {number}"} for number in range(100)))
    data = read("pretrain", name)
    assert (len(data.train), len(data.evaluation)) == (95, 5)
    assert {*data.train["text"], *data.evaluation["text"]} == {f"text {number}" for number in range(100)}
    lines = [int(line.split(":")[1]) for line in data.train["line"]]
    assert lines == sorted(lines)
    assert read("pretrain", name).evaluation["text"][:] == data.evaluation["text"][:]
    assert read("pretrain", name, seed=1).evaluation["text"][:] != data.evaluation["text"][:]
    assert len(read("pretrain", name, held_out=0.2).evaluation) == 20
    assert read("pretrain", name, held_out=0).evaluation is None
    assert str(data) == "data.jsonl: 95 examples of text, 5 held out"


def test_instances_of_one_line_are_held_out_together(file):
    records = [
        {"instruction": f"Task {number}.", "instances": [{"output": "a"}, {"output": "b"}]} for number in range(20)
    ]
    data = read("sft", file(*records), held_out=0.25)
    assert (len(data.train), len(data.evaluation)) == (30, 10)
    assert not set(data.train["line"]) & set(data.evaluation["line"])


def test_too_few_examples_to_hold_some_out(file):
    data = read("sft", file(SFT, SFT))
    assert data.evaluation is None
    assert data.notes == ("2 examples are too few to hold some out: nothing is evaluated.",)


def test_a_digest_is_of_what_examples_say_and_not_of_where_they_stand(file, tmp_path):
    first = read("sft", file(SFT, SFT))
    other = read("sft", write(tmp_path / "other.jsonl", SFT, {"unused": 1, **SFT}))
    assert first.digest == other.digest
    assert read("sft", "data.jsonl", seed=1).digest == first.digest
    for records in ((SFT,), (SFT, SFT | {"completion": "5"}), ({"text": "2 + 2 = 4"},) * 2):
        assert read("sft", file(*records)).digest != first.digest


@pytest.mark.parametrize("share", [1, -0.1, float("nan")])
def test_what_is_held_out_is_a_share(share, file):
    with pytest.raises(HalfstepError, match="it is a share of the examples, from 0 to below 1"):
        read("sft", file(SFT), held_out=share)


def test_a_report_of_the_data(file):
    data = read("kto", file(KTO, SFT | {"label": 0, "id": 3}))
    assert data.to_dict() == {
        "task": "kto",
        "source": "data.jsonl",
        "columns": ["prompt", "completion", "label"],
        "is_conversational": False,
        "num_train": 2,
        "num_evaluation": 0,
        "notes": list(data.notes),
    }
    assert list(data.texts()) == [SFT["prompt"], SFT["completion"]] * 2
    talk = read("sft", file({"messages": [USER, ANSWER]}))
    assert list(talk.texts()) == ["hi", "hello"]
    assert str(talk) == "data.jsonl: 1 example of messages, none held out"


def test_every_task_has_forms():
    assert tuple(FORMS) == TASKS
