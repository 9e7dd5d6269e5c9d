"""What TRL makes of the data: the tokens that are learned, the lengths that were counted, losses that fall."""

import copy
import functools
import json

import datasets
import pytest
import torch
import trl

from halfstep.train.dataset import read
from halfstep.train.lengths import check_lengths
from halfstep.train.pretrained import find

# TRL knows by its old name what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

KINDS = {"pretrain": "SFT", "sft": "SFT", "dpo": "DPO", "kto": "KTO"}
USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello you"}


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def make_trainer(data, loaded, folder, **settings):
    config, kind = (getattr(trl, KINDS[data.task] + name) for name in ("Config", "Trainer"))
    given = {
        "output_dir": str(folder),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "activation_checkpointing": False,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_length": 128,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    if data.task == "pretrain":
        given |= {"packing": True, "packing_strategy": "wrapped"}
    reference = {"ref_model": copy.deepcopy(loaded.load())} if data.task in ("dpo", "kto") else {}
    return kind(
        loaded.load(),
        args=config(**given | settings),
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=loaded.tokenizer,
        **reference,
    )


@functools.cache
def builtin(task):
    return read(task, "builtin")


def losses(task, folder, **settings):
    """Of a few steps of TRL's trainer on builtin data: on what was held out before and after, and of every step."""
    data = builtin(task)
    trainer = make_trainer(data, find("tiny", data), folder, **settings)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    return before, after, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("task", "most"), [("pretrain", 6.3), ("sft", 6.3), ("dpo", 0.6), ("kto", 0.47)])
def test_losses_fall_in_a_few_steps(task, most, tmp_path):
    """At first a language model's loss is that of 1024 equal tokens, 6.93; that of a pair log 2; of a judgement 0.5."""
    first = {"pretrain": 6.93, "sft": 6.93, "dpo": 0.6931, "kto": 0.5}[task]
    shorter = {"max_length": 64} if task == "pretrain" else {}
    before, after, _ = losses(task, tmp_path, max_steps=12, learning_rate=2e-3, **shorter)
    assert before == pytest.approx(first, abs=0.05)
    assert after < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "rate", "most"), [("pretrain", 3e-3, 6.0), ("sft", 3e-3, 5.75), ("dpo", 1e-3, 0.1), ("kto", 1e-3, 0.25)]
)
def test_losses_fall_far_in_a_hundred_steps(task, rate, most, tmp_path):
    before, after, steps = losses(task, tmp_path, max_steps=100, learning_rate=rate, warmup_steps=10)
    assert after < most < 0.87 * before
    assert sum(steps[-10:]) / 10 < 0.87 * steps[0]


def write(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def prepared(tmp_path, task, *records):
    data = read(task, write(tmp_path / "data.jsonl", *records), held_out=0)
    loaded = find("tiny", data)
    return data, loaded, make_trainer(data, loaded, tmp_path / "out").train_dataset


def test_an_answer_and_its_end_are_learned_and_the_prompt_is_not(tmp_path):
    _, loaded, made = prepared(tmp_path, "sft", {"prompt": "Say it.\n", "completion": "it, it"})
    learned = [token for token in made[0]["labels"] if token != -100]
    assert loaded.tokenizer.decode(learned) == "it, it</s>"
    assert loaded.tokenizer.decode(made[0]["input_ids"]) == "<s>Say it.\nit, it</s>"


@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
def test_the_end_of_a_prompt_of_builtin_data_is_the_end_of_a_token(task, tmp_path):
    """Else TRL would leave the last token of the prompt out."""
    data = builtin(task)
    words = find("tiny", data).tokenizer
    answers = [column for column in data.columns if column not in ("prompt", "label")]
    for row in data.train:
        prompt = words(row["prompt"])["input_ids"]
        for answer in answers:
            assert words(row["prompt"] + row[answer])["input_ids"][: len(prompt)] == prompt


def test_an_instruction_ends_with_a_token_as_well(tmp_path):
    record = {"instruction": "Add.", "input": "2, 3", "output": "\n 5"}
    _, loaded, made = prepared(tmp_path, "sft", record)
    assert loaded.tokenizer.decode([token for token in made[0]["labels"] if token != -100]) == "5</s>"


def test_a_conversation_keeps_its_template(tmp_path):
    _, loaded, made = prepared(tmp_path, "sft", {"prompt": [USER], "completion": [ANSWER]})
    assert loaded.tokenizer.decode(made[0]["input_ids"]) == "<s><|user|>\nhi there</s><|assistant|>\nhello you</s>"
    assert loaded.tokenizer.decode([token for token in made[0]["labels"] if token != -100]) == "hello you</s>"
    _, loaded, made = prepared(tmp_path, "sft", {"messages": [USER, ANSWER]})
    assert loaded.tokenizer.decode(made[0]["labels"]) == "<s><|user|>\nhi there</s><|assistant|>\nhello you</s>"


@pytest.mark.parametrize(
    ("task", "records"),
    [
        ("sft", [{"text": "once"}, {"text": "once upon a time"}]),
        ("sft", [{"prompt": "a b\n", "completion": "c"}, {"prompt": "a\n", "completion": "b c d e"}]),
        ("sft", [{"messages": [USER, ANSWER]}]),
        ("dpo", [{"prompt": "a b\n", "chosen": "c", "rejected": "d e f"}]),
        ("dpo", [{"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "no"}]}]),
        ("kto", [{"prompt": "a b\n", "completion": "c", "label": number % 2} for number in range(8)]),
    ],
)
def test_lengths_are_what_trl_makes(task, records, tmp_path):
    data, loaded, made = prepared(tmp_path, task, *records)
    lengths = check_lengths(data, loaded.tokenizer, 128)
    expected = []
    for row in made:
        if task == "sft":
            expected.append(len(row["input_ids"]))
        else:
            answers = (row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row)
            expected.append(len(row["prompt_ids"]) + max(map(len, answers)))
    assert (lengths.longest, lengths.num_tokens) == (max(expected), sum(expected))


def test_examples_keep_their_line_through_trl(tmp_path):
    data, _, made = prepared(tmp_path, "dpo", {"prompt": "a\n", "chosen": "b", "rejected": "c"})
    assert made["line"][:] == data.train["line"][:] == [f"{tmp_path / 'data.jsonl'}:1"]


def test_text_is_packed_into_whole_contexts(tmp_path):
    records = [{"text": f"the {number}. sentence of a long story"} for number in range(100)]
    data = read("pretrain", write(tmp_path / "data.jsonl", *records), held_out=0)
    loaded = find("tiny", data)
    made = make_trainer(data, loaded, tmp_path / "out", max_length=64, shuffle_dataset=False).train_dataset
    tokens = [token for row in made for token in row["input_ids"]]
    assert tokens == [token for record in records for token in loaded.tokenizer(record["text"] + "</s>")["input_ids"]]
    assert {len(ids) for ids in made["input_ids"][:-1]} == {64}
    assert torch.equal(torch.tensor(made[0]["labels"]), torch.tensor(made[0]["input_ids"]))
