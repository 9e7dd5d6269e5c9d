"""Weights that are held at once as they are read: the same bits as narrowed afterwards, and not more memory."""

import copy
import json
import os
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from halfstep import HalfstepError
from halfstep.compare.memory import LiveBytes
from halfstep.plan.quantized import hold_base_in_16_bit
from halfstep.policy import Policy
from halfstep.train import four_bit, pretrained, run, tiny
from halfstep.train.adapters import adapt
from halfstep.train.held import Held
from halfstep.train.quiet import quieten
from halfstep.train.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what transformers plans to rename
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys"
    ),  # of PEFT, for experts without adapters
]
quieten()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels for devices that are not here
    pytest.importorskip("bitsandbytes")

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SIZES | HEADS)
KINDS = {
    "llama": (LlamaForCausalLM, LLAMA),
    "tied": (LlamaForCausalLM, LlamaConfig(**SIZES | HEADS, tie_word_embeddings=True)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=16)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES | HEADS, num_local_experts=8)),  # experts are put together
}


def saved(folder, dtype="bfloat16", kind="llama"):
    """A model whose vectors are not all ones, in several files."""
    torch.manual_seed(0)
    make, config = KINDS[kind]
    model = make(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="50KB")
    return folder


def loaded(folder, settings, policy, is_at_once):
    held = Held.by(settings, policy, "cpu") if is_at_once else None
    torch.manual_seed(1)  # of adapters: nothing before them takes a random number
    model = pretrained._filled(str(folder), AutoConfig.from_pretrained(folder), held)
    return adapt(model, settings, policy).model


def contents(model):
    """Bits of all that ``model`` holds, with its format, and what is attached to its modules."""
    found = {name: (p.dtype, p.shape, p.requires_grad, bits(p)) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            found[f"{name} state"] = (state.dtype, state.shape, state.blocksize, bits(state.absmax))
    for name, buffer in model.named_buffers():
        found[f"{name} buffer"] = (buffer.dtype, bits(buffer))
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        names = sorted(name for name in vars(module) if name != "_is_hf_initialized")
        found[f"{name} module"] = (type(module), module.training, *hooks, names)
    return found


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("quantize", [None, "4bit"])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32", "bf16 model.layers.1.*=fp32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_held_at_once_has_the_bits_of_fp32_narrowed_after(dtype, policy, quantize, tmp_path):
    """Rules name modules without adapters; a format of a file is rounded once, to what is held."""
    text, _, rule = policy.partition(" ")
    parsed = replace(Policy.parse(text), modules=(tuple(rule.split("=")),) if rule else ())
    settings = Settings("sft", lora=True, lora_rank=8, quantize=quantize)
    saved(tmp_path, dtype)
    at_once, after = (loaded(tmp_path, settings, parsed, way) for way in (True, False))
    assert contents(at_once) == contents(after)
    assert at_once.config.to_dict() == after.config.to_dict()


@pytest.mark.parametrize("kind", ["tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_models_of_other_kinds_have_the_same_bits(kind, quantize, tmp_path):
    settings = Settings("sft", lora=True, lora_rank=8, quantize=quantize)
    saved(tmp_path, kind=kind)
    at_once, after = (loaded(tmp_path, settings, Policy.parse("bf16"), way) for way in (True, False))
    assert contents(at_once) == contents(after)
    ids = torch.arange(8)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(at_once(ids).logits, after(ids).logits)


def test_files_of_pickle_are_read_the_same_way(tmp_path):
    saved(tmp_path)
    settings, policy = Settings("sft", lora=True, lora_rank=8, quantize="4bit"), Policy.parse("bf16")
    before = contents(loaded(tmp_path, settings, policy, True))
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert contents(loaded(tmp_path, settings, policy, True)) == before


def test_a_weight_in_pieces_is_packed_as_the_whole_is(monkeypatch):
    from bitsandbytes.nn import Params4bit

    for shape in ((7, 9), (70, 190)):
        weight = torch.randn(shape)
        layer = four_bit._shell(torch.nn.Linear(*reversed(shape)), "", Policy.parse("fp32"))
        whole = Params4bit(weight.clone(), compress_statistics=False, blocksize=64, quant_type="nf4").to("cpu")
        monkeypatch.setattr(four_bit, "_PIECE", 128)
        packed = four_bit.pack(layer, weight, "cpu")
        assert packed.shape == whole.shape
        assert torch.equal(packed.data, whole.data)
        for name in ("absmax", "code"):
            assert torch.equal(getattr(packed.quant_state, name), getattr(whole.quant_state, name))


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_reference_is_the_copy_narrowed_after_and_never_in_fp32_beside_the_model(policy):
    torch.manual_seed(0)
    model, parsed = LlamaForCausalLM(LLAMA), Policy.parse(policy)
    wanted = copy.deepcopy(model).requires_grad_(False).eval()
    if policy == "bf16":
        hold_base_in_16_bit(wanted, parsed)
    live = LiveBytes()
    live.count(model.parameters())
    before = live.now
    with live:
        found = adapt(model, Settings("dpo"), parsed).reference
    assert contents(found) == contents(wanted)
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in found.parameters()}
    assert not shared
    num = sum(p.numel() for p in model.parameters())
    # Buffers and vectors are a few hundred numbers.
    assert live.peak - before <= {"bf16": 2, "fp32": 4}[policy] * num + 4096


@pytest.mark.parametrize(
    ("settings", "policy", "each", "beside"),
    [
        ({"lora": True}, "bf16", 2, 0),
        ({"lora": True}, "fp16", 2, 2),  # as the file has it
        ({"lora": True, "quantize": "4bit"}, "bf16", 0.5625, 26),  # the file's, fp32, and 20 of bitsandbytes
        ({}, "bf16", 4, 2),
    ],
)
def test_the_peak_is_what_is_held_and_one_weight(settings, policy, each, beside, tmp_path):
    """Live tensors; each: bytes a weight of a block, beside: those of the one that is read."""
    saved(tmp_path)
    held = Held.by(Settings("sft", **settings), Policy.parse(policy), "cpu")
    config = AutoConfig.from_pretrained(tmp_path)
    four_bit.check_kernels("cpu")  # tables of bitsandbytes
    with LiveBytes() as live, patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
        pretrained._filled(str(tmp_path), config, held)
    tables, vectors = 2 * 128 * 64, 64 * 5
    blocks = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert live.peak <= each * blocks + (2 if held else 4) * tables + 4 * vectors + beside * 64 * 128 + 1024


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A folder that has all but its weights, and data."""
    monkeypatch.chdir(tmp_path)
    LlamaConfig(**SIZES | {"vocab_size": 1024} | HEADS).save_pretrained(tmp_path / "base")
    tiny.tokenizer(["one two three"]).save_pretrained(tmp_path / "base")
    rows = [{"prompt": "one", "completion": "two"}] * 20
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": "base", "data": "data.jsonl", "device": "cpu", "batch": 2, "max_length": 16}


def test_what_does_not_fit_is_refused_before_weights_are_read(job):
    def refused(settings, model, policy, device, length):
        assert {p.device.type for p in model.parameters()} == {"meta"}
        raise HalfstepError("it", "does not fit", "Use another.")

    with patch.object(run, "plan_job", refused), pytest.raises(HalfstepError, match="does not fit"):
        run.train(Settings("sft", memory=0.001, **job))
    with pytest.raises(HalfstepError, match="its weights cannot be loaded"):
        run.train(Settings("sft", **job))


def test_a_weight_of_another_shape_is_refused_in_one_line(tmp_path):
    saved(tmp_path)
    config = LlamaConfig(**SIZES | {"intermediate_size": 192} | HEADS)
    held = Held.by(Settings("sft", lora=True, quantize="4bit"), Policy.parse("bf16"), "cpu")
    with pytest.raises(HalfstepError, match="its weights cannot be loaded") as caught:
        pretrained._filled(str(tmp_path), config, held)
    assert "\n" not in str(caught.value)


def test_a_device_without_kernels_is_refused_before_weights_are_read():
    held = Held.by(Settings("sft", lora=True, quantize="4bit"), Policy.parse("bf16"), "meta")
    with (
        patch("bitsandbytes.functional.quantize_4bit", side_effect=RuntimeError("no such kernel")),
        pytest.raises(HalfstepError, match=r"bitsandbytes .* has no kernels for it here \(no such kernel\)"),
    ):
        pretrained._filled("nowhere", LLAMA, held)


def test_a_model_that_trains_whole_is_held_in_fp32():
    assert Held.by(Settings("sft"), Policy.parse("bf16"), "cpu") is None
    assert Held.by(Settings("sft", lora=True), Policy.parse("fp32"), "cpu") is None


def test_cuda_is_the_card_of_the_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert run.place_of("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [run.place_of(device) for device in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert run.place_of("cuda") == "cuda:1"
