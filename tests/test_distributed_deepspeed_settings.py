"""A policy as DeepSpeed's configuration, and back. DeepSpeed itself is not needed for it."""

import pytest
from reference.nets import AMX, CPU

from halfstep import HalfstepError, LossScale, Policy
from halfstep.distributed import deepspeed_config
from halfstep.distributed.deepspeed_settings import policy_of
from halfstep.hardware import Hardware

V100 = Hardware.of("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0))
SCALE = "scale.init=256 scale.interval=500 scale.floor=2 scale.hysteresis=3"


def config_of(policy, **settings):
    return deepspeed_config(policy, hardware=CPU, **settings)


def test_fp32_weights_need_no_block():
    assert config_of("bf16 module:head=fp32", stage=1, accumulate=4, max_norm=0.5) == {
        "halfstep": {"policy": "bf16 module:head=fp32"},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 0.5,
    }


@pytest.mark.parametrize(
    ("policy", "block"),
    [
        ("bf16 master=copy", {"bf16": {"enabled": True, "check_grad_overflow": True}}),
        (
            f"fp16 master=copy on_overflow=skip {SCALE}",
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 8,
                    "loss_scale_window": 500,
                    "hysteresis": 3,
                    "consecutive_hysteresis": True,
                    "min_loss_scale": 2,
                }
            },
        ),
        ("fp16 master=copy scale=static scale.init=128", {"fp16": {"enabled": True, "loss_scale": 128.0}}),
        ("fp16 master=copy scale=none", {"fp16": {"enabled": True, "loss_scale": 1.0}}),
    ],
)
def test_16_bit_weights_are_a_block_that_stands_for_the_policy(policy, block):
    config = config_of(policy, reduce="bf16")
    assert {name: config.get(name) for name in ("bf16", "fp16") if name in config} == block
    assert config["communication_data_type"] == "bf16"
    assert policy_of(config) == Policy.parse(policy)
    by_hand = policy_of({name: value for name, value in config.items() if name != "halfstep"})
    assert (by_hand.compute, by_hand.master) == (Policy.parse(policy).compute, "copy")
    if "fp16" in block and "none" not in policy:
        assert by_hand.scale == Policy.parse(policy).scale


def test_a_scale_that_deepspeed_cannot_express_travels_in_the_text():
    policy = (
        "fp16 master=copy on_overflow=skip scale.growth=4 scale.backoff=0.25 scale.floor=0.125 scale.ceiling=131072"
    )
    config = config_of(policy)
    assert config["fp16"]["min_loss_scale"] == 1
    assert policy_of(config) == Policy.parse(policy)


@pytest.mark.parametrize(
    ("hardware", "policy"),
    [(AMX, "bf16"), (V100, "fp16 on_overflow=skip"), (CPU, "fp32")],
    ids=lambda value: getattr(value, "name", value),
)
def test_auto_is_settled_by_the_device(hardware, policy):
    """fp16 is picked with steps that are dropped, since the default of an fp16 policy cannot be had."""
    config = deepspeed_config("auto", hardware=hardware)
    assert config["halfstep"] == {"policy": policy}
    assert not {"bf16", "fp16", "torch_autocast"} & config.keys()


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, Policy("fp32")),
        ({"bf16": {"enabled": False}}, Policy("fp32")),
        ({"bfloat16": {"enabled": True}}, Policy("bf16", master="copy", on_overflow="skip")),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, Policy("bf16", on_overflow="skip")),
        (
            {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 32}},
            Policy(
                "fp16",
                master="copy",
                on_overflow="skip",
                scale=LossScale("dynamic", init=2.0**32, interval=1000, ceiling=2.0**32),
            ),
        ),
    ],
)
def test_a_configuration_written_by_hand_stands_for_a_policy(config, policy):
    assert policy_of(config) == policy


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("fp16", {}, "policy 'fp16' under DeepSpeed: a micro-batch that overflowed is in DeepSpeed's sums already"),
        ("fp16", {}, "Drop such steps instead: 'fp16 on_overflow=skip'."),
        ("bf16 on_exhausted=promote", {}, "finding the module to promote runs the step once more"),
        ("bf16 master=split16", {}, "master=split16 under DeepSpeed"),
        ("bf16 master=copy module:head=fp32", {}, "gives all weights of a model one format"),
        ("bf16", {"stage": 0}, "stage=0: ZeRO has stages 1, 2 and 3"),
        ("bf16", {"accumulate": 0}, "accumulate=0: a window holds whole micro-batches"),
        ("bf16", {"max_norm": -1.0}, "max_norm=-1.0: a norm is clipped to a positive number"),
        ("bf16", {"reduce": "int8"}, "reduce='int8': no format that gradients travel in"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(policy, settings, message):
    with pytest.raises(HalfstepError) as raised:
        config_of(policy, **settings)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": True}}, "fp16.hysteresis=2 without fp16.consecutive_hysteresis"),
        ({"torch_autocast": {"enabled": True, "dtype": "float64"}}, "torch_autocast.dtype='float64': no 16-bit format"),
        ({"halfstep": {"policy": "fp16"}}, "cannot be replayed"),
    ],
)
def test_a_configuration_that_stands_for_no_policy_is_refused(config, message):
    with pytest.raises(HalfstepError, match=message):
        policy_of(config)
