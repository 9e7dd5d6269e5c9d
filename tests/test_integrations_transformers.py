"""PrecisionMixin in front of Trainer: the losses are those without it, logs are true, nobody notices a replay."""

import json
import math

import pytest
import torch
from reference.trainers import Precise, arguments, logs, net, rows, same_weights, trained
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from halfstep import HalfstepError, ScaleExhausted
from halfstep.events import Overflow, StepReport
from halfstep.integrations.bookkeeping import Bookkeeping
from halfstep.integrations.transformers import PrecisionMixin

pytestmark = [pytest.mark.usefixtures("kernels_stay")]


class Poisoned(Precise):
    """The losses of some micro-batches, counted from 1 and with replays, are multiplied."""

    at, factor, num = (), math.nan, 0

    def compute_loss(self, model, inputs, **more):
        loss = super().compute_loss(model, inputs, **more)
        self.num += model.training
        return loss * self.factor if model.training and self.num in self.at else loss


def poisoned(at, args, policy, factor=math.nan, **more):
    trainer = Poisoned(net(), args, train_dataset=rows(), policy=policy, **more)
    trainer.at, trainer.factor = at, factor
    return trainer


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum") / num_items_in_batch


class Means(nn.Module):
    """Not of Transformers: its loss is a mean, which the Trainer divides by the length of the window."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 64)

    def forward(self, input_ids, labels):
        logits = self.layer(input_ids.float() / 64).float()  # torch's autocast takes the loss of 16-bit ones in 16 bit
        return {"loss": F.cross_entropy(logits, labels[:, 0])}


SHORT = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    ("settings", "extra", "model"),
    [
        ({}, {}, net),
        pytest.param({"activation_checkpointing": True}, {}, net, marks=pytest.mark.slow),
        ({"label_smoothing_factor": 0.1, **SHORT}, {}, net),
        pytest.param({}, {"compute_loss_func": mean_over_tokens}, net, marks=pytest.mark.slow),
        pytest.param({"average_tokens_across_devices": False, **SHORT}, {}, net, marks=pytest.mark.slow),
        (SHORT, {}, Means),
    ],
    ids=["plain", "checkpointing", "smoothing", "loss_func", "short_window", "means"],
)
def test_losses_are_those_without_the_mixin(tmp_path, settings, extra, model):
    """To the bit where no clipping acts; a gradient norm is summed in another order, and off by an eps of fp32."""
    args = {"bf16": True, "eval_strategy": "epoch", "max_grad_norm": 10.0, **settings}
    data = {"train_dataset": rows(), "eval_dataset": rows(4), **extra}
    plain = trained(Trainer(model(), arguments(tmp_path, **args), **data))
    ours = trained(Precise(model(), arguments(tmp_path, **args), **data))
    assert ours.info.effective == "bf16"
    assert max(logs(plain, "grad_norm")) < 10.0
    assert logs(ours, "loss") == logs(plain, "loss")
    assert logs(ours, "learning_rate") == logs(plain, "learning_rate")
    assert logs(ours, "grad_norm") == pytest.approx(logs(plain, "grad_norm"), rel=1e-6)
    assert same_weights(ours.model, plain.model)
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_clipping_is_as_without_the_mixin(tmp_path):
    """torch divides by the norm + 1e-6. Adam does not see such a factor but by its eps, SGD sees it as it is."""
    args = {"bf16": True, "optim": "sgd", "max_grad_norm": 0.1, "max_steps": 1}
    plain = trained(Trainer(net(), arguments(tmp_path, **args), train_dataset=rows()))
    ours = trained(Precise(net(), arguments(tmp_path, **args), train_dataset=rows()))
    for p, q, start in zip(ours.model.parameters(), plain.model.parameters(), net().parameters(), strict=True):
        torch.testing.assert_close(p - start, q - start, rtol=1e-4, atol=1e-8)


# Logs.


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_nan_is_shown_where_it_was_and_nowhere_else(tmp_path, policy, capsys):
    args = arguments(tmp_path, gradient_accumulation_steps=1, max_steps=6, logging_steps=2)
    trainer = poisoned((3,), args, policy)
    output = trainer.train()
    losses = logs(trainer, "loss")
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    assert logs(trainer, "skipped_steps", "replays") == [(0, 0), (1, 0), (0, 0)]
    first = 65536.0 if policy == "fp16" else 1.0
    last = 32768.0 if policy == "fp16" else 1.0
    assert logs(trainer, "loss_scale") == [first, last, last]
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    # The mean over the five steps whose loss is finite: those two intervals, and one step of the third.
    assert math.isfinite(output.training_loss)
    assert output.metrics["train_skipped_steps"] == 1
    assert output.metrics["train_loss"] == output.training_loss


def test_train_loss_is_the_mean_of_the_finite_losses(tmp_path, capsys):
    reports = []
    args = arguments(tmp_path, gradient_accumulation_steps=1, max_steps=5, logging_steps=2)
    output = poisoned((2, 5), args, "bf16", sinks=[reports.append]).train()
    losses = [event.loss for event in reports if isinstance(event, StepReport)]
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert len(finite) == 3
    assert output.training_loss == pytest.approx(sum(finite) / 3, rel=1e-6)
    assert math.isnan(poisoned((1, 2), arguments(tmp_path, max_steps=1), "bf16").train().training_loss)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_the_learning_rate_waits_for_an_applied_step(tmp_path, optim, capsys):
    args = arguments(tmp_path, gradient_accumulation_steps=1, optim=optim)
    trainer = trained(poisoned((2,), args, "fp16 on_overflow=skip"))
    assert logs(trainer, "learning_rate", "skipped_steps") == [(0.01, 0), (0.0075, 1), (0.0075, 0), (0.005, 0)]


def test_an_evaluation_shows_its_nan(tmp_path):
    model = net()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    trainer = Precise(model, arguments(tmp_path), eval_dataset=rows(4), policy="bf16")
    assert math.isnan(trainer.evaluate()["eval_loss"])


# Replay and the floor.


def test_a_replay_changes_nothing_but_its_counters(tmp_path):
    """A run whose scale begins too high, and one that begins where that one came to, with dropout in both."""
    events = []
    high = Precise(
        net(),
        arguments(tmp_path, max_grad_norm=0.0),
        train_dataset=rows(),
        policy="fp16 scale.init=16777216",
        sinks=[events.append],
    )
    trained(high)
    replays = [event for event in events if isinstance(event, Overflow)]
    assert logs(high, "replays")[0] == len(replays) > 1
    assert replays[0].micro_batch in (0, 1)
    scale = high.stepper.scale.value.item()
    low = trained(
        Precise(net(), arguments(tmp_path, max_grad_norm=0.0), train_dataset=rows(), policy=f"fp16 scale.init={scale}")
    )
    assert logs(low, "replays") == [0, 0, 0, 0]
    # Gradients under 2^-24 of the higher scale are rounded otherwise: none here.
    assert logs(high, "loss") == logs(low, "loss")
    assert logs(high, "loss_scale") == logs(low, "loss_scale") == [scale] * 4


def test_the_floor_stops_with_the_last_good_weights(tmp_path, capsys):
    trainer = poisoned(range(3, 99), arguments(tmp_path, gradient_accumulation_steps=1), "fp16 scale.init=16", 1e30)
    good = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **more):
            good[:] = [parameter.clone() for parameter in model.parameters()] if state.global_step == 2 else good

    trainer.add_callback(Keep())
    with pytest.raises(ScaleExhausted, match=r"floor of 1, step 4.*last applied step\.$") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert all(torch.equal(p, q) for p, q in zip(good, trainer.model.parameters(), strict=True))


def test_a_module_that_fp16_cannot_hold_is_promoted_and_resumed_so(tmp_path):
    def fragile():
        model = net()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(3e6)
        return model

    settings = {"save_strategy": "steps", "save_steps": 2}
    policy = "fp16 on_exhausted=promote"
    full = trained(Precise(fragile(), arguments(tmp_path, **settings), train_dataset=rows(), policy=policy))
    assert "module:model.layers.0.mlp.down_proj=fp32" in full.info.effective
    assert logs(full, "skipped_steps") == [0] * 4
    (tmp_path / "checkpoint-4").rename(tmp_path / "last")
    resumed = Precise(fragile(), arguments(tmp_path, **settings), train_dataset=rows(), policy=policy)
    trained(resumed, resume_from_checkpoint=True)
    assert resumed.info.effective == full.info.effective
    assert same_weights(resumed.model, full.model)


def test_the_log_of_two_runs(tmp_path):
    trainer = Precise(net(), arguments(tmp_path), train_dataset=rows(), policy="bf16", log=tmp_path / "log")
    for _ in range(2):
        trained(trainer)
    (file,) = (tmp_path / "log").iterdir()
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["run", *["step"] * 4, "end"] * 2


def test_bookkeeping_puts_back_what_trainers_keep():
    class Owner:
        pass

    owner = Owner()
    owner.count, owner.metrics, owner.seen = 3, {"train": {"loss": [1.0]}, "eval": {}}, {1}
    before = owner.metrics["train"]["loss"]
    kept = Bookkeeping(owner)
    for _ in range(2):
        owner.count += 1
        owner.metrics["train"]["loss"].append(2.0)
        owner.metrics["train"]["tokens"] = [9]
        owner.metrics["eval"] = {"new": [1]}
        owner.seen.add(2)
        owner.more = 1
        kept.restore()
        assert vars(owner) == {"count": 3, "metrics": {"train": {"loss": [1.0]}, "eval": {}}, "seen": {1}}
        assert owner.metrics["train"]["loss"] is before


# Answers.


class TwoBackwards(Trainer):
    num = 2

    def training_step(self, model, inputs, num_items_in_batch=None):
        for _ in range(self.num):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
        return torch.tensor(0.0)


class NoBackward(TwoBackwards):
    num = 0


@pytest.mark.parametrize("base", [TwoBackwards, NoBackward])
def test_a_trainer_with_a_step_of_its_own_kind(tmp_path, base):
    trainer = type("Mine", (PrecisionMixin, base), {})(net(), arguments(tmp_path), train_dataset=rows(), policy="bf16")
    with pytest.raises(HalfstepError, match=rf"Mine\.training_step with {base.num} calls of accelerator.backward"):
        trainer.train()


def test_the_mixin_behind_the_trainer():
    with pytest.raises(HalfstepError, match=r"class Wrong\(Trainer, PrecisionMixin\).*in front of it"):
        type("Wrong", (Trainer, PrecisionMixin), {})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True: evaluate.. would round the weights"),
        ({"optim": "lomo"}, "optim='lomo': it moves weights during the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'"),
    ],
)
def test_arguments_that_cannot_be_had(tmp_path, settings, said):
    with pytest.raises(HalfstepError, match=said):
        Precise(net(), arguments(tmp_path, **settings), train_dataset=rows(), policy="bf16")


def test_several_gpus_in_one_process(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(HalfstepError, match=r"2 GPUs in one process.*torchrun --nproc_per_node 2"):
        Precise(net(), args, train_dataset=rows(), policy="bf16")


def test_a_model_in_16_bit(tmp_path):
    with pytest.raises(HalfstepError, match=r'12 trainable parameters in bfloat16 .*dtype="float32".*master=split16'):
        Precise(net().bfloat16(), arguments(tmp_path), train_dataset=rows(), policy="bf16")
    trainer = Precise(net().bfloat16(), arguments(tmp_path), train_dataset=rows(), policy="bf16 master=split16")
    assert len(logs(trained(trainer), "loss")) == 4


def test_flags_and_policies(tmp_path, caplog):
    def requested(policy=None, **flags):
        trainer = Precise(net(), arguments(tmp_path, **flags), eval_dataset=rows(2), policy=policy)
        trainer.evaluate()
        return trainer.info.requested

    assert requested() == "auto"
    assert requested(fp16=True) == "fp16"
    assert requested(bf16=True) == "bf16"
    assert requested("auto", bf16=True) == "auto"
    assert caplog.messages == []
    assert requested("fp16", bf16=True) == "fp16"
    assert caplog.messages == ["The policy fp16 is in effect, and the argument bf16=True is not used."]


# Runs after and before each other.


def test_evaluate_before_train_and_train_twice(tmp_path):
    trainer = Precise(net(), arguments(tmp_path), train_dataset=rows(), eval_dataset=rows(4), policy="fp16")
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.info.effective == "fp16"
    first = trained(trainer).stepper
    second = trained(trainer).stepper
    assert first is not second
    assert first.num_steps == second.num_steps == 4
    assert trainer.predict(rows(4)).predictions.dtype == "float32"
    assert len(trainer.model._forward_hooks) == 1  # not one a run
    plain = net()
    plain.load_state_dict(trainer.model.state_dict())
    other = Precise(trainer.model, arguments(tmp_path), eval_dataset=rows(4), policy="fp32")
    fp32 = Precise(plain, arguments(tmp_path), eval_dataset=rows(4), policy="fp32").evaluate()["eval_loss"]
    assert other.evaluate()["eval_loss"] == fp32  # no region of the trainer before


def test_a_second_trainer_goes_on_from_the_exact_weights(tmp_path):
    first = trained(Precise(net(), arguments(tmp_path), train_dataset=rows(), policy="bf16 master=split16"))
    exact = {name: weight.clone() for name, weight in first.stepper.weights()}
    more = {"train_dataset": rows(), "policy": "bf16 master=split16"}
    second = trained(Precise(first.model, arguments(tmp_path, max_steps=1, learning_rate=0.0), **more))
    assert all(torch.equal(weight, exact[name]) for name, weight in second.stepper.weights())


def test_a_new_model_for_each_run(tmp_path):
    trainer = Precise(args=arguments(tmp_path), train_dataset=rows(), model_init=lambda: net(), policy="fp16")
    for _ in range(2):
        assert trained(trainer).stepper.model is trainer.model


def test_trials_of_a_search(tmp_path):
    """Each makes the Trainer's Accelerator anew, and the model; the trial is given as wandb's sweep gives it."""
    trainer = Precise(args=arguments(tmp_path), train_dataset=rows(), model_init=lambda: net(), policy="fp16")
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.WANDB, None
    trainer._get_output_dir = lambda trial: str(tmp_path)
    for rate in (1e-2, 1e-3):
        trained(trainer, trial={"learning_rate": rate})
        assert logs(trainer, "learning_rate")[0] == rate
        assert trainer.stepper.model is trainer.model
        assert trainer.stepper.num_steps == 4


@pytest.mark.slow  # it collects garbage between two tries
def test_a_batch_size_that_is_found(tmp_path):
    class Large(Precise):
        num = 0

        def compute_loss(self, *args, **more):
            self.num += 1
            if self.num == 4:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(*args, **more)

    args = arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=4)
    trainer = trained(Large(net(), args, train_dataset=rows(), policy="fp16"))
    assert trainer._train_batch_size < 4
    assert trainer.stepper.num_steps == 4


def test_what_callbacks_see_before_the_step(tmp_path):
    """Sums that are still scaled and not clipped, beside the true norm in the log."""
    seen = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **more):
            seen.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

    args = arguments(tmp_path, max_steps=1, max_grad_norm=0.01)
    trainer = Precise(net(), args, train_dataset=rows(), policy="fp16 scale.init=1024", callbacks=[Look()])
    trained(trainer)
    assert seen == pytest.approx([1024 * logs(trainer, "grad_norm")[0]], rel=1e-3)


@pytest.mark.slow
def test_compiled(tmp_path):
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="aot_eager", max_steps=2)
    trainer = trained(Precise(net(), args, train_dataset=rows(), policy="bf16 module:lm_head=fp32"))
    eager = Precise(net(), arguments(tmp_path, max_steps=2), train_dataset=rows(), policy="bf16 module:lm_head=fp32")
    assert logs(trainer, "loss") == pytest.approx(logs(trained(eager), "loss"), rel=2**-8)
    assert all("_orig_mod" not in name for name, _ in trainer.stepper.weights())
