"""PrecisionMixin in front of TRL's trainers: same losses as without it, and a replay counts no metric twice."""

import os
import warnings

import pytest
import torch
from reference.trainers import arguments, logs, net, same_weights, trained
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from halfstep import HalfstepError
from halfstep.integrations.transformers import PrecisionMixin

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import peft
    import trl

datasets.disable_progress_bars()
pytestmark = [
    pytest.mark.usefixtures("kernels_stay"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # TRL's own use of an old name
]

WORDS = ["[PAD]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(61))]


def tokens():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def texts(num, length, seed):
    drawn = torch.randint(3, 64, (num, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[i] for i in row) for row in drawn]


COLUMNS = {
    "sft": lambda: {"text": texts(12, 8, 0)},
    "dpo": lambda: {"prompt": texts(12, 3, 0), "chosen": texts(12, 4, 1), "rejected": texts(12, 4, 2)},
    "kto": lambda: {"prompt": texts(12, 3, 0), "completion": texts(12, 4, 1), "label": [True, False] * 6},
    "reward": lambda: {"chosen": texts(12, 5, 1), "rejected": texts(12, 5, 2)},
    "grpo": lambda: {"prompt": texts(12, 3, 0)},
    "rloo": lambda: {"prompt": texts(12, 3, 0)},
}
NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
GENERATION = {"num_generations": 2, "max_completion_length": 4}


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")  # PEFT writes into it


def num_words(completions, **more):
    return [float(len(set(completion.split()))) for completion in completions]


def trainer(task, folder, policy=None, is_plain=False, model=None, settings=None, **more):
    kind = getattr(trl, f"{NAMES[task]}Trainer")
    if not is_plain:
        kind = type(f"Precise{kind.__name__}", (PrecisionMixin, kind), {})
        more["policy"] = policy
    # A norm of several would be clipped, which torch rounds otherwise.
    settings = {"max_steps": 2, "max_grad_norm": 100.0, **(settings or {})}
    if task in ("grpo", "rloo"):
        settings |= GENERATION
        more["reward_funcs"] = num_words
    if task == "reward":
        settings["gradient_checkpointing"] = False
    if model is None:
        model = net(LlamaForSequenceClassification, num_labels=1) if task == "reward" else net()
    if task in ("dpo", "kto", "rloo"):  # which load a second one, to compare with
        model.save_pretrained(folder / "start")
        model = type(model).from_pretrained(folder / "start")
    args = arguments(folder, getattr(trl, f"{NAMES[task]}Config"), **settings)
    return kind(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_dict(COLUMNS[task]()),
        processing_class=tokens(),
        **more,
    )


def all_logs(trainer):
    """All that was logged but the times."""
    times = ("time", "runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in trainer.state.log_history]


TASKS = [
    "sft",
    "dpo",
    pytest.param("kto", marks=pytest.mark.slow),
    pytest.param("grpo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("task", TASKS)
def test_losses_and_metrics_are_those_without_the_mixin(tmp_path, task):
    """To the bit, but for the norm, which is summed in another order; TRL says bf16=True by itself."""
    plain = trained(trainer(task, tmp_path, is_plain=True))
    ours = trained(trainer(task, tmp_path))
    assert ours.info.effective == "bf16"
    assert same_weights(ours.model, plain.model)
    added = {"loss_scale", "skipped_steps", "replays", "train_skipped_steps", "train_replays"}
    for ours_entry, plain_entry in zip(all_logs(ours), all_logs(plain), strict=True):
        assert {k: v for k, v in ours_entry.items() if k not in added | {"grad_norm"}} == {
            k: v for k, v in plain_entry.items() if k != "grad_norm"
        }
    assert logs(ours, "grad_norm") == pytest.approx(logs(plain, "grad_norm"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("more", [{"peft": True}, {"precompute_ref_log_probs": True}], ids=["adapters", "precomputed"])
def test_references_of_another_kind(tmp_path, task, more):
    """The model without its adapters, or log-probabilities from before training: no Stepper is there yet."""
    settings = {key: value for key, value in more.items() if key != "peft"}
    plain, ours = (
        trained(
            trainer(
                task,
                tmp_path,
                is_plain=is_plain,
                settings=settings,
                peft_config=lora() if "peft" in more else None,
            )
        )
        for is_plain in (True, False)
    )
    assert logs(ours, "loss") == logs(plain, "loss")
    assert same_weights(ours.model, plain.model)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reward", "rloo"])
def test_losses_are_near_those_without_the_mixin(tmp_path, task):
    """torch's autocast on CPUs sums in bf16 what CUDA's and the policy's region sum in fp32: some roundings of 2^-9."""
    plain, ours = (trained(trainer(task, tmp_path, is_plain=is_plain)) for is_plain in (True, False))
    assert logs(ours, "loss") == pytest.approx(logs(plain, "loss"), rel=2**-9, abs=1e-6)
    assert logs(ours, "grad_norm") == pytest.approx(logs(plain, "grad_norm"), rel=2**-7)


REPLAYED = [
    "sft",
    "grpo",
    *[pytest.param(task, marks=pytest.mark.slow) for task in ("dpo", "kto", "reward", "rloo")],
]


@pytest.mark.parametrize("task", REPLAYED)
def test_a_replay_counts_no_metric_twice(tmp_path, task):
    """A run whose loss scale begins too high logs what one does whose scale begins where that one came to."""
    high = trained(trainer(task, tmp_path, "fp16 scale.init=16777216"))
    assert high.state.log_history[-1]["train_replays"] > 0
    low = trained(trainer(task, tmp_path, f"fp16 scale.init={high.stepper.scale.value.item()}"))
    assert low.state.log_history[-1]["train_replays"] == 0
    own = {"replays", "train_replays", "loss_scale"}
    for one, other in zip(all_logs(high), all_logs(low), strict=True):
        assert {k: v for k, v in one.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


# Adapters.


def test_adapters_on_a_16_bit_base_are_fp32(tmp_path, caplog):
    ours = trained(trainer("sft", tmp_path, model=net().bfloat16(), peft_config=lora()))
    base = net().bfloat16().model.layers[0].mlp.up_proj.weight
    assert torch.equal(ours.model.base_model.model.model.layers[0].mlp.up_proj.weight, base)
    assert {p.dtype for p in ours.model.parameters() if p.requires_grad} == {torch.float32}
    assert caplog.messages == []


def test_adapters_that_were_made_16_bit_are_fp32_again(tmp_path, caplog):
    model = peft.get_peft_model(net().bfloat16(), lora(), autocast_adapter_dtype=False)
    ours = trained(trainer("sft", tmp_path, model=model))
    assert {p.dtype for p in ours.model.parameters() if p.requires_grad} == {torch.float32}
    assert "2 trainable weights of adapters" in caplog.text
    assert "were bfloat16 and are fp32 now" in caplog.text


def test_adapters_that_a_trainer_has_rounded_are_what_they_were(tmp_path):
    """As TRL does to those of a quantised model."""

    class Rounding(trl.SFTTrainer):
        def __init__(self, model, **more):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.bfloat16()
            super().__init__(model, **more)

    model = peft.get_peft_model(net(), lora())
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    args = arguments(tmp_path, trl.SFTConfig)
    data = datasets.Dataset.from_dict(COLUMNS["sft"]())
    kind = type("Mine", (PrecisionMixin, Rounding), {})
    kind(model, args=args, train_dataset=data, processing_class=tokens(), policy="bf16")
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_model_by_name(tmp_path):
    """TRL loads it in fp32, whatever it was saved in; in 16 bit where it is told to."""
    net().bfloat16().save_pretrained(tmp_path / "saved")
    ours = trainer("sft", tmp_path, model=str(tmp_path / "saved"))
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    with pytest.raises(HalfstepError, match=r'model_init_kwargs=\{"dtype": "float32"\}'):
        trainer(
            "sft",
            tmp_path,
            model=str(tmp_path / "saved"),
            settings={"model_init_kwargs": {"dtype": "bfloat16"}},
        )


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    full = trained(trainer("sft", tmp_path, "fp16 scale.init=16777216", settings=saving))
    (tmp_path / "checkpoint-2").rename(tmp_path / "last")
    resumed = trainer("sft", tmp_path, "fp16 scale.init=16777216", settings=saving)
    trained(resumed, resume_from_checkpoint=True)
    assert same_weights(full.model, resumed.model)
    assert full.stepper.scale.state_dict() == resumed.stepper.scale.state_dict()
    assert logs(full, "loss", "entropy") == logs(resumed, "loss", "entropy")
