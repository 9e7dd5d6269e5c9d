"""The memory of a job before it starts: closed forms, the trainer's own live tensors, the switch that makes it fit."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from halfstep import HalfstepError
from halfstep.compare.memory import LiveBytes
from halfstep.hardware import detect
from halfstep.plan.measure import target_on
from halfstep.plan.size import MIB
from halfstep.plan.step_trace import StepTrace, Storage
from halfstep.policy import Policy
from halfstep.train import planned, run
from halfstep.train.planned import job_of, plan_job
from halfstep.train.planned_step import Job, job_step
from halfstep.train.quiet import quieten
from halfstep.train.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what transformers plans to rename
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("kernels_stay"),
]
quieten()
CPU = target_on(detect("cpu"))
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
VECTORS = 64 * 5
TABLE = 128 * 64
BLOCKS = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
NUM = VECTORS + TABLE + BLOCKS
ADAPTERS = 2 * 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
JOB = Job("sft", LlamaForCausalLM, CONFIG, "bf16", 2, 16, 1, 1.0, "adamw", False, None, None, False)


def held(**changes):
    """Bytes by what they are, at the peak."""
    return job_step(replace(JOB, **changes), CPU).peak.components


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw8bit"])
def test_states_are_the_closed_form(optimizer):
    """Moments of vectors and of the embedding stay in fp32, as transformers has it; small matrices do as well."""
    small = 4 * 32 * 64  # of keys and values, below 4096 elements
    wanted = {"sgd": 0, "adamw": 8 * NUM}.get(
        optimizer, 2 * (BLOCKS - small) * (1 + 4 / 256) + 8 * (VECTORS + TABLE + small)
    )
    found = held(optimizer=optimizer)
    assert found["weights"] == 4 * NUM
    # AdamW counts its steps, 4 bytes a parameter tensor.
    assert 0 <= found.get("optimizer states", 0) - wanted <= 4 * (2 * 9 + 2)


def test_the_base_of_adapters_is_the_closed_form():
    """Linear layers without an adapter are held in 4 bits as well."""
    few = {"targets": ("q_proj", "mlp.up_proj"), "rank": 8}
    assert held(rank=8)["weights"] == 2 * (BLOCKS + TABLE) + 4 * (VECTORS + ADAPTERS)
    adapters = 2 * 8 * ((64 + 64) + (64 + 128))
    assert held(**few, in_4_bit=True)["weights"] == BLOCKS * 0.5625 + 2 * TABLE + 4 * (VECTORS + adapters)


def test_a_reference_is_a_second_model_in_16_bit_or_the_adapters_switched_off():
    whole, adapted = held(task="dpo"), held(task="kto", rank=8)
    assert 0 <= whole["buffers"] - (2 * (BLOCKS + TABLE) + 4 * VECTORS) < 1024
    assert adapted["buffers"] < 1024


def test_a_job_is_what_the_settings_say():
    settings = Settings("sft", batch=2, max_length=16, lora=True, lora_rank=8, lora_targets="q_proj, up_proj")
    job = job_of(settings, LlamaForCausalLM(CONFIG), Policy.parse("bf16"), 16)
    assert replace(job, config=None) == replace(JOB, rank=8, targets=("q_proj", "up_proj"), config=None)


def trace_of(job, target):
    """A step of 24 MiB of weights, 16 of states, and 1 a sample, of which checkpointing keeps a fifth."""
    states = {"adamw": 16, "adamw8bit": 4}[job.optimizer] if job.rank is None else 0
    weights = 24 if job.rank is None else 4 if job.in_4_bit else 12
    sample = 0.2 if job.checkpointing else 1.0
    sizes = [round(size * MIB) for size in (weights, states, sample * job.batch)]
    storages = [
        Storage(size, component, None, None, None, None, None, 0, None)
        for size, component in zip(sizes, ("weights", "optimizer states", "activations"), strict=True)
    ]
    return StepTrace(storages, 0, (), job.batch, job.batch, 1, 1, job.policy, growth=(0.0, 0.0, sample * MIB))


class Stubs:
    """Workers whose steps are :func:`trace_of`."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def run(self, calls):
        return [trace_of(*call.args) for call in calls]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(planned, "Workers", Stubs)


def asked(mib, **settings):
    given = {"batch": 8, "max_length": 64, "memory": None if mib is None else mib / 1024, **settings}
    return plan_job(Settings("sft", **given), LlamaForCausalLM(CONFIG), Policy.parse("bf16"), "cpu", 64)


def test_what_fits_is_said_with_its_parts(here):
    found = asked(50)
    assert found.need == 48 * MIB
    assert "a step needs 48 MiB of" in str(found)
    assert str(found).endswith("which has 50 MiB (weights 24 MiB, optimizer states 16 MiB, activations 8 MiB).")
    assert "What --options change" in str(asked(50, options="warmup_steps=2"))


def test_a_device_whose_memory_is_not_known_refuses_nothing(here, monkeypatch):
    monkeypatch.setattr(planned, "target_on", lambda hardware: replace(CPU, memory_gib=None))
    assert "whose memory is not known" in str(asked(None))


@pytest.mark.parametrize(
    ("mib", "settings", "text"),
    [
        (46.5, {}, "--batch 4 --accumulate 2 (44 MiB)"),
        (44.5, {"accumulate": 3}, "--batch 4 --accumulate 6 (44 MiB)"),
        (40.5, {}, "--checkpointing --batch 2 --accumulate 4 (40.4 MiB)"),
        (40.5, {"batch": 1}, "--checkpointing (40.2 MiB)"),
        (36.5, {"batch": 1}, "--optimizer adamw8bit (29 MiB)"),
        (15.5, {}, "--lora --batch 2 --accumulate 4 (14 MiB)"),
        (13.7, {"batch": 8, "checkpointing": True, "lora": True}, None),
        (10.5, {"checkpointing": True, "lora": True}, "--quantize 4bit (5.6 MiB)"),
        (3.0, {}, None),
    ],
)
def test_the_cheapest_switch_that_makes_it_fit_is_named(here, mib, settings, text):
    """Smaller micro-batches first, then what costs more."""
    if text is None and mib > 4:
        assert asked(mib, **settings).need <= mib * MIB
        return
    with pytest.raises(HalfstepError) as caught:
        asked(mib, **settings)
    line = str(caught.value)
    assert line.startswith(f"sft of {settings.get('batch', 8)} x 64 tokens: it needs ")
    if text is None:
        assert line.endswith("The least is --lora --quantize 4bit --checkpointing (5.6 MiB).")
    else:
        assert f". Add {text}" in line


def test_a_job_that_cannot_fit_writes_nothing(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HalfstepError, match="No switch makes it fit"):
        run.train(Settings("sft", device="cpu", memory=0.001, batch=2, max_length=64))
    assert list(tmp_path.iterdir()) == []


ROWS = [
    {},
    {"checkpointing": True},
    {"policy": "bf16 master=split16", "checkpointing": True},
    {"optimizer": "adamw8bit"},
    {"lora": True},
    {"lora": True, "quantize": "4bit", "checkpointing": True},
]


@pytest.mark.parametrize(
    "settings", [pytest.param(row, marks=[] if row == ROWS[2] else pytest.mark.slow, id=str(row)) for row in ROWS]
)
def test_a_plan_is_what_the_trainer_holds(settings, tmp_path, monkeypatch):
    """Live tensors of the third step of the real trainer."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "The sum is ", "completion": "of the parts " * 9} for _ in range(40)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"policy": "bf16", "data": "data.jsonl", "batch": 4, "max_length": 64, "device": "cpu", "lora_rank": 8}
    found, live = {}, LiveBytes()
    adapt, make = run.adapt, run.make_trainer

    class Measure(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            gc.collect()
            live.peak = live.now

        def on_step_end(self, args, state, control, **kwargs):
            found["measured"] = live.peak

    def adapted(model, settings, policy, device):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # what was made before is not counted
        found["job"] = job_of(settings, model, policy, 0)
        return adapt(model, settings, policy, device)

    def made(*args):
        trainer = make(*args)
        trainer.add_callback(Measure())
        collate = trainer.data_collator

        def collated(examples):
            batch = collate(examples)
            found["length"] = batch["input_ids"].shape[1]
            return batch

        trainer.data_collator = collated
        return trainer

    gc.disable()
    try:
        with patch.object(run, "adapt", adapted), patch.object(run, "make_trainer", made), live:
            run.train(Settings("sft", output="out", steps=3, **given | settings))
    finally:
        gc.enable()
    planned_peak = job_step(replace(found["job"], length=found["length"]), CPU).peak.nbytes
    # What is over is the loss of the prompt's tokens, and a mask: of so small a model a few percent.
    assert 0.99 < planned_peak / found["measured"] < 1.06
    assert torch.get_default_dtype() is torch.float32
