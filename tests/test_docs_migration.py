"""What docs/migration.md says of old checkpoints and old settings, beside runs that were never interrupted."""

import json
import re
from pathlib import Path

import accelerate
import pytest
import torch
from accelerated import accelerator_for, adamw, fresh_state, loader, loss_of, net, weights
from safetensors.torch import load_model

from halfstep import HalfstepError, Stepper
from halfstep.distributed.deepspeed_settings import deepspeed_config, policy_of

PAGE = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()


@pytest.fixture(autouse=True)
def _state(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    with fresh_state():
        yield


def schedule(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


def train(accelerator, model, optimizer, scheduler, num):
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(6), scheduler)
    for _ in range(num):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model))


def test_files_of_accelerate_load_by_themselves(tmp_path):
    """Two epochs of Accelerate alone; and one, its folder, and one of ours. Clipping rounds once less in ours."""
    theirs = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = net()
    optimizer = adamw(model, fused=False)
    scheduler = schedule(optimizer)
    train(theirs, model, optimizer, scheduler, 1)
    theirs.save_state(tmp_path)
    expected = train(theirs, model, optimizer, scheduler, 1)
    with fresh_state():
        ours = accelerator_for("bf16", 2)
        model = net()
        optimizer = adamw(model, fused=False)
        scheduler = schedule(optimizer)
        load_model(model, tmp_path / "model.safetensors")
        optimizer.load_state_dict(torch.load(tmp_path / "optimizer.bin"))
        scheduler.load_state_dict(torch.load(tmp_path / "scheduler.bin"))
        torch.testing.assert_close(train(ours, model, optimizer, scheduler, 1), expected, rtol=0, atol=1e-7)
        with pytest.raises(RuntimeError, match="registered objects"):
            ours.load_state(tmp_path)


def test_a_state_of_fusedadam_goes_on_as_that_of_adamw():
    """FusedAdam's is that of AdamW with the steps of a group in the group, here taken from AdamW itself."""

    def run(model, optimizer, num):
        stepper = Stepper(model, optimizer, "fp32")
        for batch in list(loader(4))[-num:]:
            stepper.step(lambda batch=batch: loss_of(model, batch))
        return model.state_dict()

    def decayless(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    model = net()
    optimizer = decayless(model)
    halfway = {name: value.clone() for name, value in run(model, optimizer, 4).items()}
    state = optimizer.state_dict()
    groups = [{"step": 4, "params": group["params"]} for group in state["param_groups"]]
    moments = {i: {k: v.clone() for k, v in of.items() if k != "step"} for i, of in state["state"].items()}
    expected = run(model, optimizer, 2)
    other = net()
    other.load_state_dict(halfway)
    namespace = {"torch": torch, "saved": {"state": moments, "param_groups": groups}, "optimizer": decayless(other)}
    exec(re.search(r"^steps = .*?\noptimizer\.load_state_dict.*?\n", PAGE, re.S | re.M).group(), namespace)
    for name, value in run(other, namespace["optimizer"], 2).items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({"fp16": {"enabled": True, "hysteresis": 1}}, "fp16 master=copy on_overflow=skip scale.interval=1000"),
        (
            {"fp16": {"enabled": True, "loss_scale": 128}},
            "fp16 master=copy on_overflow=skip scale=static scale.init=128",
        ),
        ({"bf16": {"enabled": True}}, "bf16 master=copy on_overflow=skip"),
        ({"bfloat16": {"enabled": True}}, "bf16 master=copy on_overflow=skip"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16 on_overflow=skip"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp16 on_overflow=skip"),
        ({}, "fp32"),
    ],
)
def test_what_blocks_of_deepspeed_become(config, policy):
    assert str(policy_of(config)) == policy


def test_the_configuration_of_the_page_is_the_one_before_it():
    """Its JSON, and what deepspeed_config makes of the policy, say the same to DeepSpeed and to us."""
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.S | re.M)
    before = json.loads(text)
    policy = policy_of(before)
    assert f'policy = "{policy}"' in PAGE
    now = deepspeed_config(policy, stage=2, accumulate=4, max_norm=1.0, micro_batch=8)
    assert before["fp16"].items() <= now["fp16"].items()
    assert {key: now[key] for key in before if key != "fp16"} == {k: v for k, v in before.items() if k != "fp16"}


def test_a_block_that_says_enabled_alone_is_refused():
    with pytest.raises(HalfstepError, match=r"hysteresis=2 without fp16\.consecutive"):
        policy_of({"fp16": {"enabled": True}})
