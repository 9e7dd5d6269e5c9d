"""transformers.Trainer with PrecisionMixin over ranks: DDP, FSDP2 and DeepSpeed beside one process."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerated import fresh_state
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from halfstep.integrations.transformers import PrecisionMixin

POLICY = "fp16 scale.init=1024 on_overflow=skip"


class PrecisionTrainer(PrecisionMixin, Trainer):
    pass


def settings_of(engine):
    if engine == "fsdp2":
        return {"fsdp": True, "fsdp_config": {"version": 2}}
    if engine == "zero2":
        return {
            "deepspeed": {
                "zero_optimization": {"stage": 2},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
            }
        }
    return {}


def fit(engine, num_ranks):
    """(loss, gradient norm, loss scale) of each step, and what brings the ranks together."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    rows = torch.randint(32, (32, 8))
    data = [{"input_ids": row, "labels": row} for row in rows]
    folder = tempfile.mkdtemp(prefix="trainer-")
    try:
        with fresh_state(), mock.patch.object(PartialState, "_prepare_backend", _gloo if engine == "zero2" else _own):
            arguments = TrainingArguments(
                folder,
                max_steps=4,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=4 // num_ranks,
                logging_steps=1,
                learning_rate=1e-2,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=engine != "zero2",
                **settings_of(engine),
            )
            trainer = PrecisionTrainer(model, args=arguments, train_dataset=data, policy=POLICY)
            trainer.train()
            logs = [(log["loss"], log["grad_norm"], log["loss_scale"]) for log in trainer.state.log_history[:4]]
            return logs, trainer.stepper.ranks.describe()["engine"]
    finally:
        shutil.rmtree(folder)


_own = PartialState._prepare_backend


def _gloo(self, *_):
    """transformers finds no backend for DeepSpeed on a machine without a GPU."""
    return "gloo", DistributedType.MULTI_CPU


@pytest.fixture(scope="module")
def alone():
    return fit("none", 1)[0]


def check(results, alone, name):
    for logs, engine in results:
        assert name in engine
        assert [log[2] for log in logs] == [log[2] for log in alone]
        for ours, theirs in zip(logs, alone, strict=True):
            # fp16 products in another order of batches, over four steps of AdamW. Seen: four equal digits.
            assert ours[:2] == pytest.approx(theirs[:2], rel=1e-3)


@pytest.mark.parametrize(("engine", "name"), [("none", "DistributedDataParallel"), ("fsdp2", "fully_shard")])
def test_a_trainer_over_two_ranks_logs_what_one_process_logs(world2, alone, engine, name):
    check(world2.run(fit, engine, 2, timeout=240), alone, name)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is for Linux alone")
def test_a_trainer_over_deepspeed_logs_what_one_process_logs(alone):
    """In ranks of its own, since DeepSpeed leaves settings of torch behind."""
    from world import World

    world = World(2)
    try:
        check(world.run(fit, "zero2", 2, timeout=240), alone, "DeepSpeed ZeRO stage 2")
    finally:
        world.close()
