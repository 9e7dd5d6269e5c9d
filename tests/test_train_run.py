"""Whole training jobs on what every machine has: the loss falls, a stopped run goes on, what is wrong is one line."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import trl
from reference.sums import write_sums
from safetensors.torch import load_file

from halfstep import HalfstepError
from halfstep.train.defaults import with_defaults
from halfstep.train.quiet import quieten
from halfstep.train.run import train
from halfstep.train.settings import Settings
from halfstep.train.trainer import arguments

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what transformers plans to rename
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
quieten()

SMALL = {"device": "cpu", "batch": 4, "max_length": 64, "steps": 12, "lr": 3e-3}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "kto"])
def test_the_loss_falls(task):
    report = train(Settings(task, **{**SMALL, "max_length": 128}))  # every signature fits, of any Python
    assert report.precision.num_applied == 12
    assert report.loss_last < report.loss_first
    assert report.evaluation is not None
    assert report.requested == "auto"
    assert report.num_trained == report.num_parameters


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "kto"])
@pytest.mark.parametrize("policy", ["auto", "fp16", "fp32", "bf16 master=split16"])
def test_the_loss_falls_by_the_defaults(task, policy):
    report = train(Settings(task, policy=policy, device="cpu"))
    assert report.precision.num_applied == report.precision.num_steps
    assert report.loss_last < 0.97 * report.loss_first
    assert report.seconds < 180


def test_every_format_learns_the_same(sums):
    losses = {}
    for policy in ("fp32", "bf16", "fp16", "bf16 master=split16"):
        report = train(Settings("sft", data=sums, policy=policy, output=policy.replace(" ", "-"), **SMALL))
        assert report.effective == policy
        losses[policy] = report.loss_last
    # 16 bit rounds at 2^-9 and 2^-12 a product; twelve steps of this model part by less than a hundredth.
    assert max(losses.values()) - min(losses.values()) < 0.01 * losses["fp32"]


def stop_after(number):
    asked = []

    def show(text, step, total):
        if step == number and not asked:  # a second one would come at once
            asked.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    return show


@pytest.mark.parametrize("policy", ["fp16", "bf16 master=split16"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(policy, sums):
    settings = {**SMALL, "data": sums, "policy": policy, "accumulate": 2, "steps": 6}
    whole = train(Settings("sft", output="whole", **settings))
    stopped = train(Settings("sft", output="stopped", **settings), stop_after(3))
    assert stopped.stopped_at == 3
    assert stopped.found
    rest = train(Settings("sft", output="stopped", resume=True, **settings))
    assert rest.stopped_at is None
    assert rest.evaluation == whole.evaluation
    left, right = (load_file(f"{name}/model/model.safetensors") for name in ("whole", "stopped"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(weight.dtype is torch.float32 for weight in left.values())
    # The log goes on too, and says where.
    steps = [json.loads(line) for line in Path("stopped/rank-00000.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps if entry["kind"] == "step"] == [1, 2, 3, 4, 5, 6]


def test_adapters_train_in_fp32_beside_a_base_in_16_bit(sums):
    report = train(Settings("sft", data=sums, policy="bf16", lora=True, **SMALL))
    assert report.num_trained < report.num_parameters
    assert any("Frozen weights are held in bf16" in note for note in report.notes)
    adapters = load_file(f"{report.output}/model/adapter_model.safetensors")
    assert {weight.dtype for weight in adapters.values()} == {torch.float32}


@pytest.mark.parametrize("lora", [False, True])
def test_a_rule_names_modules_of_the_model_also_beneath_adapters(lora, sums):
    settings = {**SMALL, "steps": 2, "data": sums, "lora": lora}
    report = train(Settings("sft", policy="bf16 module:model.layers.0.*=fp32", **settings))
    assert report.effective.endswith("model.layers.0.*=fp32")
    assert report.precision.num_applied == 2


def test_a_machine_with_several_cards_trains_on_one(monkeypatch, tmp_path):
    """What transformers finds there is set by hand: it would wrap the model in nn.DataParallel."""
    made = trl.SFTConfig.__post_init__

    def finds_four(args):
        made(args)
        args._n_gpu = 4

    monkeypatch.setattr(trl.SFTConfig, "__post_init__", finds_four)
    settings = with_defaults(Settings("sft", device="cpu"), None)
    assert arguments(settings, tmp_path).n_gpu == 1


def test_options_reach_trl(sums):
    report = train(Settings("sft", data=sums, options="num_train_epochs=1 optim=sgd", **{**SMALL, "steps": None}))
    assert report.precision.num_steps == 15  # 57 examples, 4 in a batch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": "warmup_step=3"}, "option warmup_step: SFTConfig has no such argument. Use warmup_steps"),
        ({"options": "lr_scheduler_type=none"}, "options 'lr_scheduler_type=none'"),
        ({"options": "load_best_model_at_end=True"}, "options 'load_best_model_at_end=True'"),
        ({"resume": True, "output": "none"}, "there is no checkpoint in it"),
        ({"model": "./nowhere"}, "model ./nowhere"),
        ({"data": "nowhere.jsonl"}, "no such file"),
        ({"max_length": 2}, "--max-length 2 leaves none for the answer"),
        ({"lora": True, "lora_targets": "nothing"}, "lora-targets=nothing"),
        ({"lora": True, "policy": "bf16 module:nothing=fp32"}, "nothing"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(given, message, tmp_path, sums):
    with pytest.raises(HalfstepError, match=message) as error:
        train(Settings("sft", **{**SMALL, "data": sums, **given}))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
