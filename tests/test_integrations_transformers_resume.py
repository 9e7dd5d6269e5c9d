"""Checkpoints of a Trainer with PrecisionMixin: exact in every layout, whole or not there, and never 16 bit alone."""

import json
import math
import os
import resource

import pytest
import torch
from reference.trainers import Precise, arguments, logs, net, rows, trained
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback

from halfstep import HalfstepError

pytestmark = [pytest.mark.usefixtures("kernels_stay")]

SAVING = {"save_strategy": "steps", "save_steps": 2}


def begun(folder, policy, model=None, **settings):
    settings = {**SAVING, **settings}
    return Precise(model or net(), arguments(folder, **settings), train_dataset=rows(), policy=policy)


def remove(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def everything(trainer):
    stepper = trainer.stepper
    weights = {name: weight.clone() for name, weight in stepper.weights()}
    return weights, stepper.scale.state_dict(), stepper.num_steps, logs(trainer, "loss", "loss_scale", "skipped_steps")


OTHER_LAYOUTS = ["bf16 master=split8", "bf16 master=kahan", "bf16 master=stochastic"]
SCALED = "fp16 scale.init=16777216 scale.interval=3"


@pytest.mark.parametrize(
    ("policy", "more", "dtype"),
    [
        ("bf16", {}, torch.float32),
        (SCALED, {}, torch.float32),
        (f"{SCALED} master=split16", {}, torch.float32),
        ("bf16 master=split16", {"tie_word_embeddings": True}, torch.float32),
        ("bf16 master=split16", {}, torch.bfloat16),
        *[pytest.param(policy, {}, torch.bfloat16, marks=pytest.mark.slow) for policy in OTHER_LAYOUTS],
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, policy, more, dtype):
    """Losses, weights, scale and its counters, to the bit; what is saved are the exact weights, in fp32."""
    full = trained(begun(tmp_path, policy, net(**more).to(dtype)))
    remove(tmp_path / "checkpoint-4")
    resumed = trained(begun(tmp_path, policy, net(**more).to(dtype)), resume_from_checkpoint=True)
    first, second = everything(full), everything(resumed)
    assert first[1:] == second[1:]
    assert first[2] == 4
    if policy.startswith("fp16"):
        assert sum(logs(full, "replays")) > 0
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name]), name
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for name, weight in saved.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, first[0][name]), name
    with open(tmp_path / "checkpoint-4" / "config.json") as file:
        assert json.load(file)["dtype"] == "float32"


class StopInWindow(TrainerCallback):
    """Ends training after the first micro-batch of the third window."""

    def on_substep_end(self, args, state, control, **more):
        control.should_training_stop = control.should_save = state.global_step == 2


def test_a_run_that_stopped_in_a_window_goes_on_at_its_beginning(tmp_path):
    """Without dropout, whose random state the Trainer saves as it is then."""
    full = trained(begun(tmp_path / "full", "fp16", net(attention_dropout=0.0)))
    stopped = begun(tmp_path / "part", "fp16", net(attention_dropout=0.0))
    stopped.add_callback(StopInWindow())
    trained(stopped)
    assert stopped.state.global_step == 2
    resumed = trained(begun(tmp_path / "part", "fp16", net(attention_dropout=0.0)), resume_from_checkpoint=True)
    assert everything(resumed)[1:] == everything(full)[1:]


def test_the_best_weights_are_the_exact_ones(tmp_path):
    args = arguments(
        tmp_path,
        **SAVING,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        save_total_limit=1,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the first checkpoint is the best
    )
    trainer = Precise(net(), args, train_dataset=rows(), eval_dataset=rows(4), policy="bf16 master=split16")
    trained(trainer)
    best = trainer.state.best_model_checkpoint
    assert best == str(tmp_path / "checkpoint-2")
    assert os.listdir(tmp_path) == ["checkpoint-2"]
    exact = dict(trainer.stepper.weights())
    for name, weight in LlamaForCausalLM.from_pretrained(best).named_parameters():
        assert torch.equal(weight, exact[name])
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    trainer.save_model(tmp_path / "final")
    for name, weight in LlamaForCausalLM.from_pretrained(tmp_path / "final").named_parameters():
        assert torch.equal(weight, exact[name])


def test_a_checkpoint_of_a_plain_trainer(tmp_path):
    Trainer(net(), arguments(tmp_path, **SAVING, max_steps=2), train_dataset=rows()).train()
    trainer = begun(tmp_path, "fp16")
    with pytest.warns(UserWarning, match=r"checkpoint-2 holds no halfstep\.pt, so that the loss scale starts afresh"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.stepper.num_steps == 2
    assert trainer.state.global_step == 4


def test_a_checkpoint_of_a_plain_trainer_goes_on_with_its_loss_scale(tmp_path):
    """On CUDA fp16=True writes scaler.pt; here torch's scaler, put there by hand."""
    Trainer(net(), arguments(tmp_path, **SAVING, max_steps=2), train_dataset=rows()).train()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    torch.save(scaler.state_dict() | {"_growth_tracker": 5}, tmp_path / "checkpoint-2" / "scaler.pt")
    trainer = begun(tmp_path, "fp16")
    with pytest.warns(UserWarning, match=r"checkpoint-2 holds no halfstep\.pt, so that its counters start afresh"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    num_more = trainer.state.global_step - 2
    assert num_more > 0
    state = trainer.stepper.scale.state_dict()
    assert state == {"kind": "dynamic", "value": 1024.0, "num_clean": 5 + num_more, "num_overflows": 0.0}


def test_a_checkpoint_of_another_number_of_ranks(tmp_path):
    first = begun(tmp_path, "fp16 scale.init=512", max_steps=2)
    trained(first)
    (checkpoint,) = tmp_path.rglob("halfstep.pt")
    checkpoint.rename(checkpoint.with_name("halfstep_0.pt"))  # as rank 0 of two would have written it
    then = begun(tmp_path, "fp16 scale.init=1024", max_steps=4)
    then.train(resume_from_checkpoint=True)
    assert then.stepper.num_steps == 4
    assert then.stepper.scale.state_dict() == {"kind": "dynamic", "value": 512.0, "num_clean": 4, "num_overflows": 0.0}


def test_a_checkpoint_of_another_policy(tmp_path):
    trained(begun(tmp_path, "fp16", max_steps=2))
    trainer = begun(tmp_path, "bf16", max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.stepper.num_steps == 4
    assert trainer.stepper.scale.state_dict() == {"kind": "none", "value": 1.0}
    back = begun(tmp_path, "fp16", max_steps=6)
    with pytest.warns(UserWarning, match="has a loss scale of kind none, and the policy one of kind dynamic"):
        back.train(resume_from_checkpoint=True)
    assert back.stepper.num_steps == 6
    assert back.stepper.scale.state_dict()["num_clean"] == 2


@pytest.mark.parametrize("before", ["bf16 master=split16", "bf16 master=stochastic", "bf16"])
@pytest.mark.parametrize("policy", ["fp32", "bf16 master=split16", "bf16 master=copy"])
def test_exact_weights_go_on_in_another_layout(before, policy, tmp_path):
    first = begun(tmp_path, before, max_steps=2)
    trained(first)
    exact = first.stepper.fp32_state_dict()
    then = begun(tmp_path, policy, max_steps=2)
    then._run_epoch = lambda **kwargs: None  # nothing but loaded
    then.train(resume_from_checkpoint=True)
    loaded = then.stepper.fp32_state_dict()
    assert all(torch.equal(loaded[name], exact[name]) for name in exact)


# A disk that is full.


class FullDisk(TrainerCallback):
    """From the last step on no file can be longer than ``limit`` bytes."""

    def __init__(self, limit):
        self.limit = limit

    def on_step_end(self, args, state, control, **more):
        if state.global_step == args.max_steps:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, hard))


@pytest.mark.parametrize(
    "limit", [500, 16_000, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (4_000, 24_000))]
)
def test_a_full_disk_leaves_no_half_of_a_checkpoint(tmp_path, limit):
    trainer = begun(tmp_path, "fp16")
    trainer.remove_callback(PrinterCallback)  # it would meet the limit too
    trainer.add_callback(FullDisk(limit))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(
            HalfstepError, match=r"folder .*checkpoint-4: it cannot be written \(.*a resume goes on"
        ) as e:
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == ["checkpoint-2"]
    resumed = trained(begun(tmp_path, "fp16"), resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert math.isfinite(resumed.state.log_history[-1]["train_loss"])


def test_what_a_killed_writer_left_is_not_resumed_and_goes(tmp_path):
    trained(begun(tmp_path, "bf16", max_steps=2))
    part = tmp_path / ".checkpoint-4.part"
    part.mkdir()
    (part / "model.safetensors").write_text("half")
    resumed = trained(begun(tmp_path, "bf16"), resume_from_checkpoint=True)
    assert resumed.stepper.num_steps == 4
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    trained(begun(tmp_path, "bf16", max_steps=2))
    (tmp_path / "checkpoint-2" / "old").touch()
    trained(begun(tmp_path, "bf16", max_steps=2))
    assert os.listdir(tmp_path) == ["checkpoint-2"]
    assert not (tmp_path / "checkpoint-2" / "old").exists()
