"""Accelerate's loops over ranks: DDP, FSDP2 and DeepSpeed beside one process over the same samples."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import accelerate
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from accelerated import accelerator_for, adamw, fresh_state, loader, loss_of, net, train, weights

from halfstep import HalfstepError, Policy, Stepper
from halfstep.distributed.deepspeed_settings import policy_of
from halfstep.events import RunInfo
from halfstep.integrations.accelerate import Accelerator
from halfstep.integrations.accelerate_zero import check_clipping, info_of_engine, write_policy

FP16 = "fp16 scale.init=65536 scale.interval=3"
NUM = 10  # batches of an epoch: of two ranks each has 5, and a window of 2 is short at the end


def one_process(policy, big=None, num_epochs=2):
    """Windows over what two ranks hold together: four batches, and two at an epoch's end."""
    model = net()
    stepper = Stepper(
        model, adamw(model), policy + (" on_overflow=skip" if "fp16" in policy else ""), accumulate=4, max_norm=0.5
    )
    reports = []
    for _ in range(num_epochs):
        for i, batch in enumerate(loader(NUM)):
            factor = 1e3 if i == big else 1.0
            reports.append(stepper.step(lambda batch=batch, factor=factor: loss_of(model, batch) * factor))
        reports.append(stepper.flush())
    return [report.to_dict() for report in reports if report], weights(model)


def whole(model):
    """The weights of a model under any engine, on every rank."""
    return torch.cat([getattr(p.detach(), "full_tensor", p.detach)().flatten() for p in model.parameters()])


def accelerator_of(engine, policy, **arguments):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    if engine == "fsdp2":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if engine.startswith("zero"):
        arguments["deepspeed_plugin"] = DeepSpeedPlugin(
            zero_stage=int(engine[-1]), gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_init_flag=False
        )
        return Accelerator(
            policy=policy,
            gradient_accumulation_steps=2,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            **arguments,
        )
    return accelerator_for(policy, 2, **arguments)


def run(engine, policy, big=None, num_epochs=2):
    """Reports and weights of a rank, by Accelerate's loop; ``big``: the batch of the epoch that overflows."""
    with fresh_state():
        accelerator = accelerator_of(engine, policy)
        model = net()
        model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(NUM))
        rank, reports = accelerator.process_index, []
        for _ in range(num_epochs):
            for i, batch in enumerate(batches):
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss * (1e3 if 2 * i + rank == big else 1.0))
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    reports.append(optimizer.report.to_dict())
                    assert norm.item() == reports[-1]["grad_norm"] or not reports[-1]["applied"]
        found = accelerator.stepper.ranks.describe(), accelerator.info.effective
        return reports, weights(model) if engine.startswith("zero") else whole(model), found


def check(results, expected):
    """Losses and norms of all ranks within what another order of fp32 sums makes of them over six steps of AdamW."""
    theirs, their_weights = expected
    for reports, values, _ in results:
        assert [report["applied"] for report in reports] == [report["applied"] for report in theirs]
        assert [report["scale"] for report in reports] == [report["scale"] for report in theirs]
        for ours, other in zip(reports, theirs, strict=True):
            if other["applied"]:
                assert ours["loss"] == pytest.approx(other["loss"], rel=1e-5)
                assert ours["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        torch.testing.assert_close(values, their_weights, rtol=0, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])


CASES = [("ddp", "bf16"), ("ddp", FP16), ("fsdp2", FP16)]
ALL = [("ddp", "fp32"), ("fsdp2", "bf16"), ("fsdp2", "fp32")]


@pytest.mark.parametrize(("engine", "policy"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)])
def test_two_ranks_train_as_one_process(world2, engine, policy):
    """In fp16 a batch of one rank overflows, and both skip the step."""
    big = 3 if "fp16" in policy else None
    results = world2.run(run, engine, policy, big)
    check(results, one_process(policy, big))
    described, effective = results[0][2]
    if engine == "ddp":
        assert described["engine"] == "DistributedDataParallel"
    else:
        assert described["shards of the model"] == "fp32 weights, fp32 gradients"
        if policy != "fp32":
            assert described["shards of 0"] == f"{policy[:4]} weights, fp32 gradients"
    assert effective.startswith(policy[:4])
    if big is not None:
        assert not all(report["applied"] for report in results[0][0])


def resumed(engine, policy, folder):
    """Four windows, saved after two, and two more by a run that was begun anew; and what it refuses in between."""
    with fresh_state():
        accelerator = accelerator_of(engine, policy)
        model = net()
        model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(16))
        batches = list(batches)
        first = train(accelerator, model, optimizer, batches[:4], 0.5)
        accelerator.save_state(folder)
        expected = train(accelerator, model, optimizer, batches[4:8], 0.5), whole(model)
        refused = ""
        if engine != "fsdp2":
            train(accelerator, model, optimizer, batches[:1])
            try:
                accelerator.save_state(folder + "-inside")
            except HalfstepError as error:
                refused = str(error)
            accelerator.wait_for_everyone()
    with fresh_state():
        accelerator = accelerator_of(engine, policy)
        model = net()
        model, optimizer, _ = accelerator.prepare(model, adamw(model), loader(16))
        train(accelerator, model, optimizer, batches[:2])
        accelerator.load_state(folder)
        again = train(accelerator, model, optimizer, batches[4:8], 0.5), whole(model)
        return first, again[0] == expected[0], torch.equal(again[1], expected[1]), again[0], refused


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_run_over_ranks_goes_on_to_the_bit(world2, engine):
    """The loss scale has grown, and counts its clean steps."""
    folder = Path(tempfile.mkdtemp(prefix="accelerated-"))
    try:
        results = world2.run(resumed, engine, "fp16 scale.init=1024 scale.interval=3", str(folder / "state"))
    finally:
        shutil.rmtree(folder)
    for _, has_same_reports, has_same_weights, reports, refused in results:
        assert has_same_reports
        assert has_same_weights
        assert [report["scale"] for report in reports] == [1024, 2048]
        assert ("on several ranks" in refused) is (engine == "ddp")


def clipped_in_parts(engine, num_ranks):
    """Norms of two parts of the parameters, which are clipped one by one and by value, and the weights after."""
    with fresh_state():
        accelerator = accelerator_of(engine, "fp16 scale.init=1024")
        accelerator.gradient_accumulation_steps = 4 // num_ranks
        model = net()
        model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(8))
        norms = []
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    for part in _inner(model):
                        norms.append(accelerator.clip_grad_norm_(part.parameters(), 0.05).item())
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        return norms, whole(model)


def _inner(model):
    inner = getattr(model, "module", model)
    return inner[0], inner[2]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_parts_of_the_parameters_are_clipped_as_on_one_device(world2, engine):
    """The gradient is unscaled once, of shards too; their norm is that of all ranks."""
    alone, their_weights = clipped_in_parts("one", 1)
    for norms, values in world2.run(clipped_in_parts, engine, 2):
        assert norms == pytest.approx(alone, rel=1e-4)  # fp16 products in another order of batches
        torch.testing.assert_close(values, their_weights, rtol=0, atol=1e-5)


def replicas_of_shards():
    """Four ranks in a mesh of two dimensions, which Accelerate itself has for GPUs alone."""
    with fresh_state(), mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        layout = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = accelerator_of("fsdp2", "bf16", parallelism_config=layout)
        accelerator.gradient_accumulation_steps = 1
        model = net()
        model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(8))
        return train(accelerator, model, optimizer, batches, 0.5), whole(model), model[0].weight.device_mesh.ndim


@pytest.mark.slow
def test_replicas_of_shards(world4):
    model = net()
    stepper = Stepper(model, adamw(model), "bf16", accumulate=4, max_norm=0.5)
    reports = [stepper.step(lambda batch=batch: loss_of(model, batch)) for batch in loader(8)]
    results = world4.run(replicas_of_shards)
    check(results, ([report.to_dict() for report in reports if report], weights(model)))
    assert results[0][2] == 2


def looks_alone():
    """One rank asks what is in effect, and goes on to where all meet."""
    with fresh_state():
        accelerator = accelerator_of("ddp", "auto")
        model = net()
        model, _ = accelerator.prepare(model, adamw(model))
        found = accelerator.info.requested if accelerator.is_main_process else ""
        accelerator.wait_for_everyone()
        return found


def test_a_rank_that_asks_alone_waits_for_nobody(world2):
    assert world2.run(looks_alone, timeout=60) == ["auto", ""]


def refusals():
    """What is refused over ranks, in one line each."""
    found = {}

    def tried(name, call):
        with fresh_state():
            try:
                call()
                found[name] = "nothing"
            except HalfstepError as error:
                found[name] = str(error)

    def with_plugin(**settings):
        accelerator_of("ddp", "bf16", fsdp_plugin=FullyShardedDataParallelPlugin(**settings))

    tried("fsdp1", lambda: with_plugin(fsdp_version=1))
    tried("two policies", lambda: with_plugin(fsdp_version=2, mixed_precision_policy="bf16"))
    tried("offload", lambda: with_plugin(fsdp_version=2, cpu_offload=True))
    with fresh_state():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        found["accelerate"] = str(accelerate.Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type)
    tried("ignored", lambda: with_plugin(fsdp_version=2, ignored_modules="0"))
    return found


def test_what_is_refused_over_ranks(world2):
    found, _ = world2.run(refusals)
    assert found.pop("accelerate") == "DistributedType.MULTI_CPU"  # by itself it drops the plugin
    assert "fsdp_version=2" in found["fsdp1"]
    assert "which weights are gathered in which format" in found["two policies"]
    assert "where the model computes" in found["offload"]
    assert "nobody would reduce" in found["ignored"]
    assert not any("\n" in text for text in found.values())


def each_batch_synchronised():
    """Gradients that travel in each micro-batch, as ``sync_each_batch`` asks for, and unused parameters."""
    with fresh_state():
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        accelerator = Accelerator(
            cpu=True,
            policy="bf16",
            gradient_accumulation_plugin=plugin,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        model = net()
        model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(NUM))
        return train(accelerator, model, optimizer, batches, 0.5), whole(model), None


def test_settings_of_ddp_and_of_accumulation(world2):
    check(world2.run(each_batch_synchronised), one_process("bf16", num_epochs=1))


def test_a_policy_becomes_a_part_of_deepspeeds_configuration():
    off = {"enabled": False}
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"gradient_clipping": 0.5, "bf16": off, "fp16": off})
    write_policy(plugin, Policy.parse("fp16 master=copy on_overflow=skip"))
    assert policy_of(plugin.deepspeed_config) == Policy.parse("fp16 master=copy on_overflow=skip")
    assert plugin.deepspeed_config["fp16"]["enabled"] is True
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    write_policy(plugin, Policy.parse("fp16 master=copy on_overflow=skip"))
    with pytest.raises(HalfstepError, match="two things about the same weights"):
        write_policy(plugin, Policy.parse("bf16"))


def test_a_configuration_of_ones_own_decides_where_nobody_asks():
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"bf16": {"enabled": True}})
    write_policy(plugin, Policy.parse("auto"))
    assert plugin.deepspeed_config == {"bf16": {"enabled": True}}
    write_policy(plugin, Policy.parse("bf16"))
    assert plugin.deepspeed_config == {"bf16": {"enabled": True}}
    with pytest.raises(HalfstepError, match=r"bf16\.enabled=true"):
        write_policy(plugin, Policy.parse("bf16 module:head=fp32"))
    with pytest.raises(HalfstepError, match=r"bf16\.enabled=true"):
        write_policy(plugin, Policy.parse("fp16 on_overflow=skip"))


def test_what_an_engine_makes_of_a_policy_is_said():
    info = RunInfo("fp16 master=copy on_overflow=skip", "fp16 master=copy on_overflow=skip", "as asked for", "", {})
    found = info_of_engine(info, Policy.parse("fp16"))
    assert found.requested == "fp16"
    assert "on_overflow=skip, since" in found.reason
    assert "master=copy, since" in found.reason
    asked = Policy.parse("fp16 master=copy on_overflow=skip")
    assert info_of_engine(info, asked).reason == "as asked for"


class Engine:
    """What a stepper asks of DeepSpeed's engine about clipping."""

    def gradient_clipping(self):
        return 0.5


def test_a_clip_that_is_not_deepspeeds_own_is_refused():
    stepper = SimpleNamespace(engine=Engine())
    check_clipping(stepper, 0.5, 2)
    with pytest.raises(HalfstepError, match=r"which clips to 0\.5"):
        check_clipping(stepper, 1.0, 2)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is for Linux alone")
@pytest.mark.parametrize("engine", ["zero1", "zero2"])
@pytest.mark.parametrize("policy", ["bf16", FP16])
def test_deepspeed_trains_as_one_process(engine, policy):
    """Short windows too. In ranks of their own, since DeepSpeed leaves settings of torch behind."""
    from world import World

    world = World(2)
    try:
        big = 3 if "fp16" in policy else None
        results = world.run(run, engine, policy, big, timeout=300)
        check(results, one_process(policy, big))
        assert "DeepSpeed ZeRO stage" in results[0][2][0]["engine"]
    finally:
        world.close()
