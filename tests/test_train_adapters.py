"""LoRA and NF4: adapters are fp32 whatever the base is held in, products are the formula's, errors are one line."""

import importlib.util
import json
import math
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file

from halfstep import HalfstepError, Stepper
from halfstep.policy import Policy
from halfstep.states import slices_at, steps_by_parameter
from halfstep.train.adapters import adapt, check_packages
from halfstep.train.dataset import read
from halfstep.train.pretrained import find
from halfstep.train.quiet import quieten
from halfstep.train.run import train
from halfstep.train.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what transformers plans to rename
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
quieten()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels for devices that are not here
    bitsandbytes = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

NEGATIVE = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004]
POSITIVE = [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
NF4 = torch.tensor([*NEGATIVE, 0.0, *POSITIVE])  # Dettmers et al. 2023, arXiv 2305.14314, appendix E


def llama(**changes):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | changes))


def adapted(policy="bf16", model=None, **settings):
    return adapt(model or llama(), Settings("sft", lora=True, lora_rank=8, **settings), Policy.parse(policy)).model


def rounded_to_nf4(weight):
    """Each value is the nearest of 16 times the largest of its 64 neighbours: the slow twin."""
    blocks = weight.detach().flatten().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    return (NF4[((blocks / largest)[..., None] - NF4).abs().argmin(-1)] * largest).view(weight.shape)


@pytest.mark.parametrize("quantize", [None, "4bit"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_adapters_are_fp32_and_the_base_is_small(policy, quantize):
    model = adapted(policy, quantize=quantize)
    low = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 14
    assert all(p.dtype is torch.float32 and "lora_" in name for name, p in trained.items())
    inner = model.base_model.model.model
    held = inner.layers[0].mlp.up_proj.base_layer.weight
    assert held.dtype is (torch.uint8 if quantize else low)
    assert inner.embed_tokens.weight.dtype is low
    assert inner.norm.weight.dtype is torch.float32


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_layer_of_4_bits_is_the_twin_and_half_a_byte_a_weight(policy):
    model = llama()
    weight = rounded_to_nf4(model.model.layers[0].mlp.up_proj.weight)
    layer = adapted(policy, model, quantize="4bit").base_model.model.model.layers[0].mlp.up_proj.base_layer
    held = [layer.weight.data, layer.weight.quant_state.absmax]
    assert sum(t.numel() * t.element_size() for t in held) == weight.numel() * (0.5 + 4 / 64)
    x = torch.randn(6, 64, requires_grad=True)
    out = layer(x)
    out.float().sum().backward()
    assert out.dtype is (torch.float32 if policy == "fp32" else torch.bfloat16)
    # bf16 rounds the inputs, the weight and the result by 2^-9 each.
    tolerance = 1e-5 if policy == "fp32" else 3 * 2**-9
    for got, wanted in ((out, x @ weight.t()), (x.grad, weight.sum(0).expand(6, -1))):
        assert (got.float() - wanted).norm() < tolerance * wanted.norm()


def test_an_adapter_is_the_formula():
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    layer = adapted("fp32", model).base_model.model.model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(b)
    x = torch.randn(3, 64)
    assert torch.allclose(layer(x), x @ weight.t() + 2 * (x @ a.t()) @ b.t(), atol=1e-5)


def test_evaluation_changes_no_weight_of_4_bits():
    """bitsandbytes would repack it for inference on a CPU with 16-bit instructions."""
    model = adapted(quantize="4bit")
    before = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.data.clone()
    ids = torch.arange(8)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = model.train()(ids).logits
        assert torch.equal(model.eval()(ids).logits, first)
        assert torch.equal(model.train()(ids).logits, first)
    assert torch.equal(before, model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.data)


def test_a_linear_layer_of_gpt2_is_held_in_4_bits_as_well():
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 16}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    weight = rounded_to_nf4(model.transformer.h[0].mlp.c_fc.weight.t())
    layer = adapted("fp32", model, quantize="4bit").base_model.model.transformer.h[0].mlp.c_fc
    x = torch.randn(3, 64)
    assert torch.allclose(layer(x), x @ weight.t(), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lora_targets": "nothing"}, "Use all-linear, or some of q_proj, k_proj"),
        ({"lora_targets": ","}, "it names no layer"),
        ({"lora_rank": 33}, r"as of model.layers.0.self_attn.k_proj \(64 to 32\)"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_line(settings, text):
    with pytest.raises(HalfstepError, match=text):
        adapt(llama(), Settings("sft", lora=True, **settings), Policy.parse("bf16"))


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"lora": True}, "peft"),
        ({"lora": True, "quantize": "4bit"}, "bitsandbytes"),
        ({"optimizer": "adamw8bit"}, "bitsandbytes"),
        ({"optimizer": "adamw4bit"}, "torchao"),
    ],
)
def test_a_package_that_is_missing_is_named(settings, package, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(HalfstepError, match=f"pip install {package}"):
        check_packages(Settings("sft", **settings))


def test_states_of_bitsandbytes_as_transformers_makes_them_are_known():
    weight = torch.nn.Parameter(torch.randn(64, 128))
    optimizer = bitsandbytes.optim.AdamW([weight], optim_bits=8)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["state1"].dtype is torch.uint8
    assert slices_at(optimizer, weight)
    assert steps_by_parameter(optimizer)


def test_states_of_8_bits_move_split_weights_in_slices_as_whole(monkeypatch):
    def trained(smallest_bytes):
        """smallest_bytes: what a slice takes at least; it has 4096 elements or more."""
        monkeypatch.setattr("halfstep.chunks._SMALLEST_BYTES", smallest_bytes)
        torch.manual_seed(0)
        model = torch.nn.Linear(128, 96, bias=False)
        optimizer = bitsandbytes.optim.AdamW(model.parameters(), lr=1e-2, optim_bits=8)
        stepper = Stepper(model, optimizer, "bf16 master=split16")
        for _ in range(3):
            x = torch.randn(8, 128)
            stepper.step(lambda x=x: model(x).float().square().mean())
        return [
            *(weight for _, weight in stepper.weights()),
            *(optimizer.state[model.weight][n] for n in ("state1", "absmax2")),
        ]

    assert all(torch.equal(a, b) for a, b in zip(trained(0), trained(5 << 20), strict=True))


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """Sixty additions, each with a wrong answer too."""
    monkeypatch.chdir(tmp_path)

    def file(task):
        path = tmp_path / f"{task}.jsonl"
        rows = [
            {"prompt": f"{a} + {b} = ", "chosen": str(a + b), "rejected": str(a)} for a in range(10) for b in range(6)
        ]
        if task == "sft":
            rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return file


def tiny_model(file):
    return find("tiny", read("sft", file)).load()


SMALL = {"device": "cpu", "batch": 4, "max_length": 64}


def test_adapters_beside_4_bits_train_and_are_kept_in_fp32(sums, tmp_path):
    report = train(
        Settings("sft", data=sums("sft"), output="out", steps=6, lr=1e-2, lora=True, quantize="4bit", **SMALL)
    )
    assert report.precision.num_applied == 6
    assert report.loss_last < report.loss_first
    kept = load_file(tmp_path / "out" / "model" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert report.num_trained == sum(tensor.numel() for tensor in kept.values())
    assert report.num_parameters == report.num_trained + sum(p.numel() for p in tiny_model(sums("sft")).parameters())


def test_the_model_without_its_adapter_is_the_reference(sums, tmp_path):
    """So that the first loss is that of two equal models, ln 2, and no second adapter is kept."""
    report = train(Settings("dpo", data=sums("dpo"), output="out", policy="fp32", steps=2, lora=True, **SMALL))
    assert report.loss_first == pytest.approx(math.log(2), abs=1e-6)
    assert not (tmp_path / "out" / "model" / "ref").exists()


def test_a_run_with_8_bit_states_goes_on_where_it_stopped(sums, tmp_path):
    """In fp16, with a loss scale and clipping."""
    given = {"data": sums("sft"), "policy": "fp16", "optimizer": "adamw8bit", "steps": 4, "max_norm": 0.5, **SMALL}
    whole = train(Settings("sft", output="whole", save_every=2, **given))
    assert whole.precision.num_applied == 4
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    train(Settings("sft", output="again", resume=True, **given))
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:OptimState4bit does not implement")  # of torch's compiler
def test_states_of_4_bits_train(sums):
    """torchao compiles its step, half a minute on a CPU."""
    pytest.importorskip("torchao")
    report = train(Settings("sft", data=sums("sft"), output="out", steps=6, lr=1e-2, optimizer="adamw4bit", **SMALL))
    assert report.precision.num_applied == 6
    assert report.loss_last < report.loss_first
