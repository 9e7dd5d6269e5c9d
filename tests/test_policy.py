"""Policies as text, as TOML and as values; what each device accepts; what every refusal says."""

from __future__ import annotations

import itertools
import pickle
import random
import re
from dataclasses import replace

import pytest

from halfstep.errors import HalfstepError
from halfstep.hardware import Hardware
from halfstep.policy import (
    COMPUTE,
    MASTERS,
    ON_EXHAUSTED,
    ON_OVERFLOW,
    PRESETS,
    RULE_FORMATS,
    LossScale,
    Policy,
    auto_policy,
    default_scale,
    resolve,
)

# ---- the text form


def random_name(rng):
    # What a module can be called, and what fnmatch reads as a pattern; blanks, commas and "=" are refused.
    letters = "abz019_.*?[]!-:/#'\"\\éß模"
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 12)))


def random_rules(rng):
    return tuple((random_name(rng), rng.choice(RULE_FORMATS)) for _ in range(rng.choice([0, 0, 1, 2, 5])))


def random_scale(rng):
    def power(low, high):
        return 2.0 ** rng.randint(low, high)

    kind = rng.choice(["none", "static", "dynamic"])
    floor, init, ceiling = sorted([power(-126, 127), power(-30, 30), power(-126, 127)])
    settings = {
        "init": init,
        "growth": power(1, 10),
        "backoff": power(-10, -1),
        "interval": rng.randint(1, 10**6),
        "floor": floor,
        "ceiling": ceiling,
        "hysteresis": rng.randint(1, 5),
    }
    return LossScale(kind, **{name: value for name, value in settings.items() if rng.random() < 0.4})


def random_policy(rng):
    while True:
        try:
            return Policy(
                rng.choice(COMPUTE),
                random_rules(rng),
                random_rules(rng),
                master=rng.choice(MASTERS),
                tf32=rng.random() < 0.3,
                scale=rng.choice([None, random_scale(rng)]),
                on_overflow=rng.choice(ON_OVERFLOW),
                on_exhausted=rng.choice(ON_EXHAUSTED),
            )
        except HalfstepError:
            continue


def random_policies(seed, count):
    rng = random.Random(seed)
    return [random_policy(rng) for _ in range(count)]


def test_text_round_trip():
    for policy in random_policies(0, 4000):
        text = str(policy)
        assert Policy.parse(text) == policy
        assert str(Policy.parse(text)) == text
        assert "," not in text


def test_toml_round_trip(tmp_path):
    path = tmp_path / "policy.toml"
    for policy in random_policies(1, 1000):
        path.write_text(policy.to_toml(), encoding="utf-8")
        assert Policy.load(path) == policy
    assert Policy.parse(f" {path}\n") == policy
    assert Policy.parse(str(path)) == policy


def test_policies_are_values():
    for policy in random_policies(2, 100):
        again = Policy.parse(str(policy))
        assert hash(again) == hash(policy)
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert Policy.parse(policy) is policy
    with pytest.raises(AttributeError):
        Policy("bf16").compute = "fp16"


def test_rules_given_as_lists_are_the_same_policy():
    policy = Policy("bf16", [["a", "fp32"]], [("softmax", "fp16")])
    assert policy == Policy.parse("bf16 module:a=fp32 op:softmax=fp16")
    assert hash(policy)


TEXTS = [
    ("bf16", Policy("bf16")),
    ("  bf16\n\tmodule:head=fp32 ", Policy("bf16", (("head", "fp32"),))),
    ("fp16", Policy("fp16", scale=LossScale("dynamic"))),
    ("fp16 scale=none", Policy("fp16", scale=LossScale())),
    ("bf16 scale=dynamic", Policy("bf16", scale=LossScale("dynamic"))),
    ("fp16 scale.init=256", Policy("fp16", scale=LossScale("dynamic", init=256))),
    ("fp16 scale.init=1e0", Policy("fp16", scale=LossScale("dynamic", init=1))),
    ("fp16 scale=static scale.init=128", Policy("fp16", scale=LossScale("static", init=128))),
    ("fp16 scale=default", Policy("fp16")),
    ("fp16 scale=conservative", Policy("fp16", scale=LossScale("dynamic", init=256))),
    ("bf16 scale=conservative", Policy("bf16", scale=LossScale("dynamic", init=256))),
    ("fp16 scale=conservative scale.init=512", Policy("fp16", scale=LossScale("dynamic", init=512))),
    ("bf16 tf32=on", Policy("bf16", tf32=True)),
    ("bf16 tf32=TRUE", Policy("bf16", tf32=True)),
    ("bf16 tf32=off", Policy("bf16")),
    ("fp32 module:a=bf16 op:linear=fp16", Policy("fp32", (("a", "bf16"),), (("linear", "fp16"),))),
    ("fp32 op:softmax=fp32", Policy("fp32", ops=(("softmax", "fp32"),))),
    ("auto module:a.b:c=fp32", Policy("auto", (("a.b:c", "fp32"),))),
    ("fp16 on_overflow=skip scale.hysteresis=2", None),
]


@pytest.mark.parametrize(("text", "policy"), TEXTS)
def test_spellings(text, policy):
    parsed = Policy.parse(text)
    assert policy is None or parsed == policy
    assert Policy.parse(str(parsed)) == parsed


def test_the_shortest_text_is_what_is_written():
    assert str(Policy("fp16", scale=LossScale("dynamic"))) == "fp16"
    assert str(Policy.parse("fp16 scale=conservative")) == "fp16 scale.init=256"
    assert str(Policy.parse("bf16 scale=conservative")) == "bf16 scale=dynamic scale.init=256"
    assert str(Policy.parse("bf16 on_overflow=replay master=fp32 tf32=off")) == "bf16"
    assert Policy.parse("bf16 tf32=on").to_toml() == 'compute = "bf16"\ntf32 = true\n'


def test_presets():
    assert PRESETS == {"default": 65536, "conservative": 256}
    assert default_scale("fp16") == LossScale("dynamic")
    assert LossScale("dynamic").init == PRESETS["default"]
    assert {name: default_scale(name).kind for name in COMPUTE if name != "fp16"} == {
        "auto": "none",
        "fp32": "none",
        "tf32": "none",
        "bf16": "none",
    }


def test_of_two_rules_for_one_name_the_later_one_stands_in_its_own_place(tmp_path):
    # a.* last decides for a.b too, in every form of the policy.
    policy = Policy("bf16", (("a.*", "fp32"), ("a.b", "fp16"), ("a.*", "bf16")))
    assert policy.modules == (("a.b", "fp16"), ("a.*", "bf16"))
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml())
    assert Policy.load(path) == policy == Policy.parse(str(policy))
    assert policy.with_module("a.b", "fp32").modules == (("a.*", "bf16"), ("a.b", "fp32"))
    assert Policy.parse("bf16 op:exp=fp32 op:exp=fp16").ops == (("exp", "fp16"),)


def test_with_module_leaves_the_rest():
    policy = Policy.parse("fp16 op:softmax=fp16 scale.init=256 on_exhausted=promote")
    assert str(policy.with_module("head", "fp32")) == (
        "fp16 module:head=fp32 op:softmax=fp16 on_exhausted=promote scale.init=256"
    )
    assert policy.modules == ()


def test_formats_and_tf32():
    policy = Policy.parse("auto module:a=fp16 op:exp=fp32 tf32=on")
    assert policy.formats == {"fp16", "fp32", "tf32"}
    assert policy.uses_tf32
    assert Policy("tf32").uses_tf32
    assert Policy("tf32").formats == {"tf32"}
    assert not Policy("fp32").uses_tf32


# ---- refusals: what is wrong, what the message says, and the nearest text that works

REFUSALS = [
    ("", "an empty policy: .* Use one of auto, fp32, tf32, bf16, fp16", "bf16"),
    (" \n", "an empty policy", "bf16"),
    ("bf17", r"compute format 'bf17': .* Use one of auto, fp32, tf32, bf16, fp16\.$", "bf16"),
    ("BF16", "compute format 'BF16'", "bf16"),
    ("e4m3", "compute format 'e4m3': .* e4m3 is a format that no region computes in", "bf16"),
    ("bf16 head", "'head' is not of the form name=value", "bf16 module:head=fp32"),
    ("bf16 module:head", "'module:head' is not of the form name=value", "bf16 module:head=fp32"),
    ("bf16 module:head=tf32", "format of module:head 'tf32': .* Use one of fp32, bf16, fp16", "bf16 module:head=fp16"),
    ("bf16 module:head=auto", "format of module:head 'auto'", "bf16 module:head=bf16"),
    ("bf16 module:head=e5m2", "e5m2 is a format that no region computes in", "bf16 module:head=fp32"),
    ("bf16 module:head=", "format of module:head ''", "bf16 module:head=fp32"),
    ("bf16 module:=fp32", "module rule ''", "bf16 module:*=fp32"),
    ("bf16 module:a=b=fp32", "format of module:a 'b=fp32'", "bf16 module:a=fp32"),
    ("bf16 module:a,b=fp32", "module rule 'a,b': a name has no blank, comma or '='", "bf16 module:a.b=fp32"),
    ("bf16 op:softmax=fp8", "format of op:softmax 'fp8'", "bf16 op:softmax=fp32"),
    ("bf16 op:=fp32", "op rule ''", "bf16 op:exp=fp32"),
    ("bf16 master=fp16", "master 'fp16': .* Use one of fp32", "bf16 master=fp32"),
    ("bf16 on_overflow=retry", "on_overflow 'retry': .* Use one of replay, skip", "bf16 on_overflow=skip"),
    ("bf16 on_exhausted=go", "on_exhausted 'go': .* Use one of stop, promote", "bf16 on_exhausted=promote"),
    ("bf16 tf32=1", "tf32=1: it is a switch. Use on or off", "bf16 tf32=on"),
    ("bf16 tf32=", "tf32=: it is a switch", "bf16 tf32=off"),
    ("fp32 tf32=on", "fp32 tf32=on: .* Write tf32", "tf32"),
    ("tf32 tf32=on", "tf32 tf32=on: .* Write tf32", "tf32"),
    ("bf16 mastr=fp32", "policy setting 'mastr': no such setting. Did you mean 'master'?", "bf16 master=fp32"),
    ("bf16 zzzz=1", "policy setting 'zzzz': no such setting. Known: compute, modules, ops", "bf16"),
    ("bf16 compute=fp16", "compute is not set like this. Write the compute format first", "fp16"),
    ("bf16 modules=head", "modules is not set like this. .* module:NAME=fp32", "bf16 module:head=fp32"),
    ("bf16 modules=", "modules is not set like this", "bf16"),
    ("bf16 ops=exp", "ops is not set like this", "bf16 op:exp=fp32"),
    ("fp16 scale=big", "scale=big: no such loss scale. Use none, static or dynamic", "fp16 scale=static"),
    ("fp16 scale.start=2", "policy setting 'scale.start': no such setting. Known: kind, init", "fp16 scale.init=2"),
    ("fp16 scale.init=x", "scale.init=x: it is a number", "fp16 scale.init=2048"),
    ("fp16 scale.interval=2.5", "scale.interval=2.5: it is a number", "fp16 scale.interval=2"),
    ("fp16 scale.init=3", "scale.init=3: .* power of two", "fp16 scale.init=4"),
    ("fp16 scale.init=0", "scale.init=0: .* power of two", "fp16 scale.init=1"),
    ("fp16 scale.init=-2", "scale.init=-2: .* power of two", "fp16 scale.init=2"),
    ("fp16 scale.init=nan", "scale.init=nan: .* power of two", "fp16 scale.init=2"),
    ("fp16 scale.ceiling=inf", "scale.ceiling=inf: .* power of two", "fp16 scale.ceiling=16777216"),
    (
        f"fp16 scale.ceiling={2.0**128}",
        "scale.ceiling=3.40282e.38: .* that fp32 holds",
        f"fp16 scale.ceiling={2.0**127}",
    ),
    (f"fp16 scale.floor={2.0**-127}", "scale.floor=5.87747e-39: .* that fp32 holds", f"fp16 scale.floor={2.0**-126}"),
    ("fp16 scale.growth=1", "scale.growth=1: it is out of range. Keep growth > 1", "fp16 scale.growth=2"),
    ("fp16 scale.growth=0.5", "scale.growth=0.5: it is out of range", "fp16 scale.growth=4"),
    ("fp16 scale.backoff=1", "scale.backoff=1: it is out of range", "fp16 scale.backoff=0.25"),
    ("fp16 scale.interval=0", "scale.interval=0: it is out of range", "fp16 scale.interval=1"),
    ("fp16 scale.hysteresis=0", "scale.hysteresis=0: it is out of range", "fp16 scale.hysteresis=1"),
    (
        "fp16 scale.floor=131072",
        "scale.init=65536: it is out of range. .* floor <= init <= ceiling",
        "fp16 scale.floor=65536",
    ),
    ("fp16 scale.ceiling=32768", "scale.init=65536: it is out of range", "fp16 scale.ceiling=65536"),
    (
        "fp16 scale.hysteresis=2",
        "scale.hysteresis=2 with on_overflow=replay: .* Add on_overflow=skip",
        "fp16 scale.hysteresis=2 on_overflow=skip",
    ),
    ("fp32 master=split16", "fp32 master=split16: this layout keeps 16-bit weights", "bf16 master=split16"),
    ("tf32 master=copy", "tf32 master=copy: .* computes in no 16-bit format", "fp16 master=copy"),
    (
        "fp32 op:linear=bf16",
        "fp32 op:linear=bf16: an op rule acts where a region computes in 16 bit, which is nowhere",
        "fp32 op:linear=bf16 module:head=bf16",
    ),
    ("tf32 module:a=fp32 op:exp=fp16", "tf32 op:exp=fp16: an op rule acts where", "tf32 module:a=fp32 op:exp=fp32"),
]


@pytest.mark.parametrize(("text", "message", "near"), REFUSALS, ids=[repr(row[0]) for row in REFUSALS])
def test_refusals_and_the_nearest_text_that_works(text, message, near):
    with pytest.raises(HalfstepError, match=message) as caught:
        Policy.parse(text)
    assert "\n" not in str(caught.value)
    assert Policy.parse(near)


@pytest.mark.parametrize("name", ["a b", "a\tb", "a=b", "a,b", "", "a\u2003b"])
def test_a_name_that_the_text_cannot_hold_is_refused_as_a_value_too(name):
    for kind in ("modules", "ops"):
        with pytest.raises(HalfstepError, match="a name has no blank, comma or '='"):
            Policy("bf16", **{kind: ((name, "fp32"),)})


# ---- the file form

TOMLS = [
    ('compute = "fp16', "is not TOML"),
    ("", "a policy without compute: it names no format. Add one of auto"),
    ('computes = "fp16"', "policy setting 'computes': no such setting. Did you mean 'compute'?"),
    ("compute = 16", "compute format 16"),
    ('compute = ["fp16"]', r"compute format \['fp16'\]"),
    ('compute = "fp16"\nmaster = {}', "master {}"),
    ('compute = "fp16"\nmodules = "head"', r"modules = 'head': it has to be a table. Write \[modules\]"),
    ('compute = "fp16"\nops = 1', "ops = 1: it has to be a table"),
    ('compute = "fp16"\nscale = "dynamic"', r"scale = 'dynamic': it has to be a table"),
    ('compute = "fp16"\n[modules]\nhead = 16', "format of module:head '16'"),
    ('compute = "fp16"\n[modules]\nblocks.0.norm = "fp32"', "format of module:blocks "),
    ('compute = "fp16"\n[scale]\ninterval = 2.5', "scale.interval=2.5: it is a number"),
    ('compute = "fp16"\n[scale]\ninterval = true', "scale.interval=True: it is a number"),
    ('compute = "fp16"\n[scale]\ninit = [1]', r"scale.init=\[1\]: it is a number"),
    ('compute = "fp16"\n[scale]\ninit = true', "scale.init=True: it is a number"),
    ('compute = "fp16"\n[scale]\nbig = 1', "policy setting 'scale.big'"),
    ('compute = "fp16"\ntf32 = 1', "tf32=1: it is a switch"),
]


@pytest.mark.parametrize(("text", "message"), TOMLS)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(HalfstepError, match=message) as caught:
        Policy.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(HalfstepError, match=r"missing\.toml: cannot be read \(No such file"):
        Policy.parse(str(tmp_path / "missing.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(HalfstepError, match="cannot be read"):
        Policy.parse(str(folder))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HalfstepError, match="is not TOML"):
        Policy.parse(str(binary))


def test_a_file_says_the_same_as_its_text(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        'compute = "fp16"\ntf32 = true\non_overflow = "skip"\n'
        '[modules]\n"blocks.*.norm" = "fp32"\nhead = "bf16"\n[ops]\nsoftmax = "fp16"\n'
        '[scale]\nkind = "conservative"\nhysteresis = 2\n'
    )
    text = (
        "fp16 tf32=on on_overflow=skip module:blocks.*.norm=fp32 module:head=bf16 op:softmax=fp16 "
        "scale=conservative scale.hysteresis=2"
    )
    assert Policy.load(path) == Policy.parse(text)


# ---- devices

V100 = Hardware.of("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0))
T4 = Hardware.of("cuda", "Tesla T4", capability=(7, 5))
GTX_1660 = Hardware.of("cuda", "NVIDIA GeForce GTX 1660", capability=(7, 5))
A100 = Hardware.of("cuda", "NVIDIA A100-SXM4-80GB", capability=(8, 0))
H100 = Hardware.of("cuda", "NVIDIA H100 80GB HBM3", capability=(9, 0))
MI300X = Hardware.of("cuda", "AMD Instinct MI300X", target="gfx942:sramecc+:xnack-")
CPU = Hardware.of("cpu", "plain CPU")
AMX = Hardware.of("cpu", "CPU with AMX", features=["amx_bf16"])
ARM = Hardware.of("cpu", "Arm CPU", features=["asimdhp"])
MPS = Hardware.of("mps", "Apple M2")

AUTO = [
    (V100, "fp16", "V100.* fp16 tensor cores but no bf16; a dynamic loss scale"),
    (T4, "fp16", "T4 has fp16 tensor cores but no bf16"),
    (GTX_1660, "fp32", "GTX 1660 has no 16-bit matrix instructions"),
    (A100, "bf16", "A100.* computes bf16 in hardware"),
    (H100, "bf16", "H100.* computes bf16 in hardware"),
    (MI300X, "bf16", "MI300X computes bf16 in hardware"),
    (CPU, "fp32", "plain CPU has no 16-bit matrix instructions"),
    (AMX, "bf16", "AMX computes bf16 in hardware"),
    (ARM, "fp32", "Arm CPU computes fp16 but no bf16, and fp16 is chosen on tensor cores alone"),
    (MPS, "fp32", "Apple M2 computes fp16 but no bf16, and fp16 is chosen on tensor cores alone"),
]


@pytest.mark.parametrize(("hardware", "compute", "reason"), AUTO, ids=lambda value: getattr(value, "name", ""))
def test_auto_and_its_reason(hardware, compute, reason):
    policy, why = auto_policy(hardware)
    assert policy == Policy(compute)
    assert re.search(reason, why)
    # The reason never contradicts the device's own verdicts.
    assert ("no 16-bit" in why) == (not hardware.native & {"bf16", "fp16"})
    assert resolve("auto", hardware) == (policy, why)


DEVICES = [V100, T4, GTX_1660, A100, H100, MI300X, CPU, AMX, ARM, MPS]
CAN = {
    "fp32": DEVICES,
    "tf32": [A100, H100, MI300X],
    "bf16": [A100, H100, MI300X, CPU, AMX, ARM],
    "fp16": [V100, T4, A100, H100, MI300X, CPU, AMX, ARM, MPS],
}
FORMS = [
    ("{}", ("fp32", "tf32", "bf16", "fp16")),
    ("fp32 module:head={}", ("fp32", "bf16", "fp16")),
    ("fp32 tf32=off op:exp={} module:head={}", ("fp32", "bf16", "fp16")),
    ("auto module:head={}", ("fp32", "bf16", "fp16")),
]


@pytest.mark.parametrize("hardware", DEVICES, ids=lambda hardware: hardware.name)
def test_what_a_device_cannot_do_is_refused_with_the_alternatives(hardware):
    for (form, formats), format in itertools.product(FORMS, CAN):
        if format not in formats:
            continue
        text = form.replace("{}", format)
        if hardware in CAN[format]:
            policy, reason = resolve(text, hardware)
            assert format in policy.formats
            assert policy.compute in hardware.native | hardware.emulated
            assert ("cpu16" in reason) == bool(policy.formats & hardware.emulated)
        else:
            with pytest.raises(HalfstepError) as caught:
                resolve(text, hardware)
            error = caught.value
            assert error.what == f"policy {Policy.parse(text)}"
            assert error.why.startswith(f"{hardware.name} cannot compute {format} (")
            offered = error.fix.removeprefix("Use ").removesuffix(", or auto.").split(", ")
            assert offered
            for name in [*offered, "auto"]:
                resolve(name, hardware)


def test_the_refusal_of_bf16_on_a_v100_word_by_word():
    with pytest.raises(HalfstepError) as caught:
        resolve("bf16", V100)
    assert str(caught.value) == (
        "policy bf16: Tesla V100-SXM2-16GB cannot compute bf16 (in tensor cores since capability 8.0, this is 7.0). "
        "Use fp16, fp32, or auto."
    )


def test_what_was_asked_for_is_what_is_in_effect():
    for text in ("bf16", "fp32", "fp16 module:a=fp32 scale.init=256"):
        policy, reason = resolve(text, H100)
        assert policy == Policy.parse(text)
        assert reason == "as asked for"


def test_auto_keeps_its_rules_and_settings():
    policy, _ = resolve("auto module:a=fp32 op:exp=fp32 on_overflow=skip on_exhausted=promote", T4)
    assert policy == replace(Policy.parse("fp16 module:a=fp32 op:exp=fp32"), on_overflow="skip", on_exhausted="promote")
    policy, _ = resolve("auto tf32=on", A100)
    assert policy == Policy("bf16", tf32=True)


def test_auto_keeps_the_numbers_of_a_scale_and_picks_its_kind():
    assert resolve("auto scale.init=256", T4)[0] == Policy.parse("fp16 scale.init=256")
    assert resolve("auto scale.init=256", A100)[0].scale.kind == "none"
    assert resolve("auto scale=static scale.init=8", A100)[0] == Policy.parse("bf16 scale=static scale.init=8")
    assert resolve("auto scale=conservative", T4)[0] == Policy.parse("fp16 scale.init=256")


def test_auto_keeps_a_layout_where_it_chooses_16_bit_and_says_where_it_does_not():
    for layout in MASTERS:
        assert resolve(f"auto master={layout}", A100)[0].master == layout
        assert resolve(f"auto master={layout}", T4)[0].master == layout
        policy, reason = resolve(f"auto master={layout}", CPU)
        assert policy == Policy("fp32")
        assert (f"master={layout} keeps 16-bit weights" in reason) == (layout != "fp32")


def test_the_format_of_a_module_is_that_of_the_innermost_rule():
    policy = Policy.parse("bf16 module:blocks=fp32 module:blocks.*.ff=fp16 module:blocks.1.ff=bf16 module:head=fp16")
    formats = {
        "": "bf16",
        "embed": "bf16",
        "head": "fp16",
        "headless": "bf16",
        "blocks": "fp32",
        "blocks.0": "fp32",
        "blocks.0.norm": "fp32",
        "blocks.0.ff": "fp16",
        "blocks.0.ff.up": "fp16",
        "blocks.1.ff.up": "bf16",
    }
    assert {name: policy.format_of(name) for name in formats} == formats


def test_auto_with_tf32_on_a_device_without_is_refused_by_name():
    for hardware in (CPU, V100, AMX):
        with pytest.raises(HalfstepError, match=r"^policy auto tf32=on: .* cannot compute tf32 \("):
            resolve("auto tf32=on", hardware)


def test_auto_with_a_16_bit_op_rule_where_auto_means_fp32():
    with pytest.raises(HalfstepError, match="fp32 op:linear=bf16: an op rule acts where"):
        resolve("auto op:linear=bf16", CPU)
    assert resolve("auto op:softmax=fp32", CPU)[0] == Policy.parse("fp32 op:softmax=fp32")


def test_emulation_and_a_missing_scale_are_said():
    assert resolve("bf16", CPU)[1] == (
        "as asked for; bf16 through cpu16, since plain CPU has no such matrix instructions: "
        "the numbers are those of 16 bit, the speed is not"
    )
    assert "fp16 without a loss scale loses gradients below 6e-8" in resolve("fp16 scale=none", T4)[1]
    assert "without a loss scale" not in resolve("fp16", T4)[1]
