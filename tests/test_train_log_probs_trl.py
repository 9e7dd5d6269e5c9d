"""The mixins in front of TRL's trainers: losses, metrics and gradients are those of TRL's own path."""

from __future__ import annotations

import copy
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.log_probs import plain

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from halfstep.policy import Policy  # noqa: E402
from halfstep.region import Region  # noqa: E402
from halfstep.train.losses import ChunkedDPO, ChunkedHead, ChunkedKTO, ChunkedSFT, _not_ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")

WORDS = 5000
"""More than one tile of the vocabulary."""
CLASSES: dict[str, tuple[type[ChunkedHead], str]] = {
    "SFT": (ChunkedSFT, "SFTTrainer"),
    "DPO": (ChunkedDPO, "DPOTrainer"),
    "KTO": (ChunkedKTO, "KTOTrainer"),
}
# fp32 sums of 5000 words and of 16 products in two orders: a few of fp32's 6e-8 on log-probabilities near 9, so 1e-6
# a token, and sums of up to 7 tokens. The issue asks for 1e-5.
LOSS = 1e-5
GRADIENT = 1e-5


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()


def llama(tied: bool = False, **more: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        initializer_range=0.3,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    words = {"[PAD]": 0, "[EOS]": 1} | {f"w{number}": number for number in range(2, WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[EOS]")


def rows(kind: str, count: int = 8) -> Any:
    made = torch.Generator().manual_seed(5)

    def ids(length: int) -> list[int]:
        return torch.randint(2, WORDS, (length,), generator=made).tolist()

    def texts(lengths: list[int]) -> list[str]:
        return [" ".join(f"w{number}" for number in ids(length)) for length in lengths]

    lengths = [3 + number % 4 for number in range(count)]
    if kind == "SFT":
        whole = [ids(length + 4) for length in lengths]
        labels = [[-100] * 4 + row[4:] for row in whole]
        return datasets.Dataset.from_dict({"input_ids": whole, "labels": labels})
    prompts = {"prompt": [f"{text} " for text in texts([4] * count)]}
    if kind == "DPO":
        return datasets.Dataset.from_dict({**prompts, "chosen": texts(lengths), "rejected": texts([5] * count)})
    labels = [number % 2 == 0 for number in range(count)]
    return datasets.Dataset.from_dict({**prompts, "completion": texts(lengths), "label": labels})


def build(kind: str, ours: bool, model: Any, folder: Path, ref: bool = True, **settings: Any) -> Any:
    mixin, name = CLASSES[kind]
    base = getattr(trl, name)
    made = type(f"Chunked{name}", (mixin, base), {"chunk_bytes": 3 * 4 * 4096}) if ours else base
    low = {"bf16": False, "fp16": False, **{key: settings.pop(key) for key in ("bf16", "fp16") if key in settings}}
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / f"{ours}"),
        per_device_train_batch_size=settings.pop("batch", 4),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=settings.pop("gradient_checkpointing", False),
        learning_rate=1e-2,
        dataset_num_proc=None,
        **({"dataset_kwargs": {"skip_prepare_dataset": True}} if kind == "SFT" else {}),
        **low,
        **settings,
    )
    more: dict[str, Any] = {}
    if kind != "SFT" and ref and not isinstance(model, peft.PeftModel):
        more["ref_model"] = moved(copy.deepcopy(model))
    return made(model=model, args=args, train_dataset=rows(kind), processing_class=tokenizer(), **more)


def moved(model: Any) -> Any:
    """A reference model that is not the policy, so that the loss has a slope everywhere."""
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model


def losses_and_gradients(trainer: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: w.grad for name, w in trainer.model.named_parameters() if w.grad is not None}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    return float(loss.detach()), gradients, metrics


def same(kind: str, folder: Path, model: Any, **settings: Any) -> tuple[Any, Any]:
    theirs = build(kind, False, copy.deepcopy(model), folder, **dict(settings))
    ours = build(kind, True, copy.deepcopy(model), folder, **dict(settings))
    loss, gradients, metrics = losses_and_gradients(theirs)
    our_loss, our_gradients, our_metrics = losses_and_gradients(ours)
    assert our_loss == pytest.approx(loss, rel=LOSS, abs=LOSS)
    assert our_gradients.keys() == gradients.keys()
    assert gradients
    assert any(float(gradient.norm()) > 0 for gradient in gradients.values())
    for name, gradient in gradients.items():
        difference = float((our_gradients[name] - gradient).norm())
        assert difference <= GRADIENT * float(gradient.norm()) + 1e-9, name
    assert our_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert our_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert "tiles" in ours.log_probs_note
    return theirs, ours


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SFT", {}),
        ("SFT", {"loss_type": "dft"}),
        ("DPO", {"loss_type": ["sigmoid"]}),
        ("DPO", {"loss_type": ["ipo"]}),
        ("DPO", {"loss_type": ["hinge"], "ld_alpha": 0.5}),
        ("DPO", {"loss_type": ["sigmoid"], "use_weighting": True}),
        ("KTO", {}),
        ("KTO", {"loss_type": "apo_zero_unpaired"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_loss_metrics_and_gradients_are_those_of_trl(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    same(kind, tmp_path, llama(tied=kind == "DPO"), **settings)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_a_peft_model_whose_reference_is_the_model_without_its_adapter(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    _, ours = same(kind, tmp_path, model)
    assert ours.ref_model is None if kind != "SFT" else True
    assert model.get_output_embeddings().weight.grad is None


def test_an_output_layer_that_peft_trains_as_a_whole(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = peft.get_peft_model(
        llama(),
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        model.get_output_embeddings().modules_to_save["default"].weight += 0.1
    _, ours = same("DPO", tmp_path, model)
    saved = [w for name, w in ours.model.named_parameters() if "lm_head.modules_to_save" in name]
    assert saved[0].grad is not None
    assert float(saved[0].grad.norm()) > 0


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_training_run_over_accumulated_micro_batches(kind: str, tmp_path: Path) -> None:
    def run(ours: bool) -> list[float]:
        settings = {"batch": 1, "gradient_accumulation_steps": 3, "max_steps": 3, "gradient_checkpointing": True}
        trainer = build(kind, ours, llama(), tmp_path, **settings)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    ours, theirs = run(True), run(False)
    assert len(ours) == 3
    # Three updates at 1e-2 pass the difference of a step on.
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_reference_log_probs_computed_beforehand(kind: str, tmp_path: Path) -> None:
    same(kind, tmp_path, llama(), precompute_ref_log_probs=True, ref=True)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_policy_and_reference_are_rounded_alike_under_autocast(kind: str, tmp_path: Path) -> None:
    """With a reference that equals the policy, the log ratio is exactly 0 and the loss a constant."""
    for name in ("bf16", "fp16"):
        trainer = build(kind, True, llama(), tmp_path, ref=False, **{name: True}, precompute_ref_log_probs=True)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model = trainer.accelerator.prepare_model(trainer.model)
        trainer.model.eval()
        loss = float(trainer.compute_loss(trainer.model, batch).detach())
        # -log sigmoid(0) and 1 - sigmoid(0), of fp32 sums that stand in the data set as fp32.
        assert loss == pytest.approx(0.6931472 if kind == "DPO" else 0.5, abs=1e-6)


def test_a_reference_model_that_was_prepared_before_runs_under_the_same_autocast(tmp_path: Path) -> None:
    model = llama()
    trainer = build("DPO", True, model, tmp_path, ref=False, bf16=True, precompute_ref_log_probs=True)
    trainer.precompute_ref_logps = False
    trainer.ref_model = trainer.accelerator.prepare_model(_trl_head(copy.deepcopy(llama())), evaluation_mode=True)
    trainer._serve_both()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model = trainer.accelerator.prepare_model(trainer.model)
    loss = float(trainer.compute_loss(trainer.model, batch).detach())
    assert loss == pytest.approx(0.6931472, abs=1e-6)


def _trl_head(model: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    return model.eval()


def test_what_the_tiles_cannot_serve_is_trls_own_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = inner.weight, inner.bias

    model = llama()
    model.set_output_embeddings(Wrapped(model.get_output_embeddings()))
    with caplog.at_level(logging.WARNING, "halfstep.train.losses"):
        trainer = build("SFT", True, model, tmp_path)
        losses_and_gradients(trainer)
    assert "TRL's own head" in trainer.log_probs_note
    assert "Wrapped" in trainer.log_probs_note
    assert len([record for record in caplog.records if "Wrapped" in record.message]) == 1


def test_a_head_that_the_policy_keeps_in_fp32_or_in_another_format(tmp_path: Path) -> None:
    """The head is never called, so its module rule has to be found."""
    seen: list[torch.Tensor] = []
    model = llama()
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    trainer = build("SFT", True, model, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    weight = model.lm_head.weight.detach()
    for text, format in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        rules = Policy.parse("bf16").with_module("lm_head", text) if text != "bf16" else Policy.parse("bf16")
        with torch.no_grad(), Region(model, rules):
            found = trainer.model(**batch, fused_lm_head=True).log_probs
        exact = plain(seen[-1].to(format), weight.to(format), labels).log_probs[:, :-1]
        assert float((found - exact).abs().max()) < 1e-5
        assert found.dtype == torch.float32


def test_weights_that_are_not_plain_ones_are_left_to_trl() -> None:
    class Sharded(torch.Tensor):
        pass

    config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace())
    head = torch.nn.Linear(4, 8)
    model = types.SimpleNamespace(config=config, get_output_embeddings=lambda: head)
    assert _not_ours(model, {}) is None
    assert "experts" in str(_not_ours(model, {"output_router_logits": True}))
    head.weight = torch.nn.Parameter(torch.zeros(8, 4).as_subclass(Sharded))
    assert "Sharded" in str(_not_ours(model, {}))
    head.weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    assert "floating point" in str(_not_ours(model, {}))
    head.weight = torch.nn.Parameter(torch.zeros(8, 4))
    head.weight.ds_id = 0
    assert "ZeRO-3" in str(_not_ours(model, {}))


def test_a_model_that_scales_and_caps_its_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=2.0,
        pad_token_id=0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = transformers.Gemma2ForCausalLM(config)
    _, ours = same("SFT", tmp_path, model)
    _matches_its_own_logits(ours)


def test_a_granite_divides_its_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        logits_scaling=4.0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    trainer = build("SFT", True, transformers.GraniteForCausalLM(config), tmp_path)
    _matches_its_own_logits(trainer)


def _matches_its_own_logits(trainer: Any) -> None:
    """The model's own forward, with full logits: nothing of TRL's in between."""
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = type(trainer.model).forward(trainer.model, **inputs).logits
        found = trainer.model(**batch, fused_lm_head=True)
    labels = batch["labels"][:, 1:]
    plain = logits[:, :-1].double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    plain = plain.where(labels != -100, 0)
    assert float((found.log_probs - plain).abs().max()) < 1e-5
    assert float(plain.min()) < -1
