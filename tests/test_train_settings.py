"""What a training job is told: by flags, by a file, and what is refused in one line."""

from dataclasses import fields
from pathlib import Path

import pytest
import trl

from halfstep import HalfstepError
from halfstep.train.defaults import with_defaults
from halfstep.train.settings import _FLAGS, OPTIMIZERS, Settings, parse_options
from halfstep.train.trainer import arguments

FLAGS = [field.name for field in fields(Settings) if field.name != "task"]


def write(tmp_path, text):
    file = tmp_path / "job.toml"
    file.write_text(text)
    return file


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = write(tmp_path, 'steps = 7\nmax-norm = 2\nlora = true\noptions = "beta=0.2"\n')
    settings = Settings.of("kto", {"steps": 9, "lora": None, "seed": 3}, file)
    assert settings == Settings("kto", steps=9, max_norm=2.0, lora=True, options="beta=0.2", seed=3)


def test_every_flag_has_its_key(tmp_path):
    values = {
        "model": '"tiny"', "data": '"x"', "output": '"o"', "policy": '"bf16"', "steps": "1", "batch": "1",
        "accumulate": "2", "lr": "0.1", "max-norm": "1", "max-length": "8", "optimizer": '"sgd"', "lora": "true",
        "lora-rank": "4", "lora-targets": '"q_proj"', "quantize": '"4bit"', "checkpointing": "true",
        "save-every": "3", "resume": "true", "seed": "1", "device": '"cpu"', "plan": "true", "memory": "8",
        "options": '""',
    }  # fmt: skip
    assert [name.replace("-", "_") for name in values] == FLAGS
    lines = "\n".join(f"{key} = {value}" for key, value in values.items())
    settings = Settings.of("sft", {}, write(tmp_path, lines))
    assert settings.memory == 8.0
    assert settings.lora_targets == "q_proj"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step = 3", r"'step' in .*job.toml: no such setting. Use model, data"),
        ("max_norm = 3", r"'max_norm' in .*: no such setting"),
        ("steps = 1.5", r"steps = 1.5 in .*: it is a whole number"),
        ("steps = true", r"steps = True in .*: it is a whole number"),
        ("lora = 1", r"lora = 1 in .*: it is true or false"),
        ("data = 3", r"data = 3 in .*: it is a text"),
        ('lr = "x"', r"lr = 'x' in .*: it is a number"),
        ("steps = ", r"config .*job.toml: it is not TOML"),
        ("steps = 0", r"steps=0: it counts something"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, message):
    with pytest.raises(HalfstepError, match=message):
        Settings.of("sft", {}, write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(HalfstepError, match="cannot be read"):
        Settings.of("sft", {}, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lora_rank": -1}, "lora-rank=-1"),
        ({"lr": 0.0}, "lr=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"max_norm": -1.0}, "max-norm=-1"),
        ({"optimizer": "adam"}, "optimizer=adam: no such optimizer. Use adamw, adamw8bit"),
        ({"quantize": "8bit", "lora": True}, "quantize=8bit"),
        ({"device": "cuda:1"}, "device=cuda:1: it is the processor, or the first card"),
        ({"device": "gpu"}, "device=gpu"),
        ({"quantize": "4bit"}, "quantize=4bit without lora: weights of 4 bits do not train. Add --lora"),
        ({"policy": "e4m3"}, "e4m3"),
        ({"options": "max_steps=3"}, "option max_steps: it has a flag of its own. Use --steps"),
        ({"options": "output_dir=x"}, "Use --output"),
        ({"options": "bf16=True"}, "Use --policy"),
        ({"options": "beta=1 beta=2"}, "option beta: it is given twice"),
        ({"options": "num_train_epochs=2", "steps": 5}, "option num_train_epochs beside steps=5: both say how long"),
        ({"options": "beta"}, "option 'beta': it is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(HalfstepError, match=message):
        Settings.of("sft", given)


def test_a_task_that_is_none():
    with pytest.raises(HalfstepError, match=r"train rl: no such task. Use pretrain, sft, dpo, kto"):
        Settings.of("rl", {})


def test_options_are_values_as_toml_writes_them_or_text():
    text = "beta=0.2 warmup_steps=10 packing=true optim=adamw_torch loss_type=['sigmoid','hinge'] a=None"
    assert parse_options(text) == {
        "beta": 0.2,
        "warmup_steps": 10,
        "packing": True,
        "optim": "adamw_torch",
        "loss_type": ["sigmoid", "hinge"],
        "a": None,
    }


@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "kto"])
def test_defaults_leave_nothing_open_and_what_is_given_alone(task):
    for settings in (Settings(task), Settings(task, model="./mine"), Settings(task, model="./mine", lora=True)):
        whole = with_defaults(settings, context=512)
        assert None not in (whole.steps, whole.batch, whole.lr, whole.max_length, whole.save_every)
        assert whole.max_length <= 512
    given = Settings(task, steps=3, batch=5, lr=0.5, max_length=64, save_every=2)
    assert with_defaults(given, None) == given


def test_epochs_say_how_long():
    whole = with_defaults(Settings("sft", options="num_train_epochs=2"), 512)
    assert whole.steps is None
    arguments_ = arguments(whole, Path("out"))
    assert (arguments_.max_steps, arguments_.num_train_epochs) == (-1, 2)
    assert arguments_.get_warmup_steps(50) == 5  # a tenth


def test_every_argument_with_a_flag_is_one_of_trl():
    names = {field.name for field in fields(trl.SFTConfig)}
    assert set(_FLAGS) - names <= {"gradient_checkpointing", "activation_checkpointing"}
    assert {flag.replace("-", "_") for flag in _FLAGS.values()} <= set(FLAGS)


def test_adapters_learn_ten_times_as_fast():
    plain, lora = (with_defaults(Settings("sft", model="./mine", lora=lora), None) for lora in (False, True))
    assert lora.lr == pytest.approx(10 * plain.lr, rel=1e-12)


def test_optimizers_are_those_of_the_page():
    assert list(OPTIMIZERS) == ["adamw", "adamw8bit", "adamw4bit", "sgd", "adafactor"]
