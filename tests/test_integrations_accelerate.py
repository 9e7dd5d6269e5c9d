"""Plain Accelerate loops on one device, beside a Stepper's own loop or plain torch."""

import copy
import pickle

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from accelerated import accelerator_for, adamw, fresh_state, loader, loss_of, net, train, weights
from torch import nn

import halfstep
from halfstep import HalfstepError, Stepper, region
from halfstep.integrations.accelerate import Accelerator

POLICIES = ["fp32", "bf16", "fp16 scale.init=1024"]


@pytest.fixture(autouse=True)
def _state(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    with fresh_state():
        yield


def twin(policy, model, optimizer, num, size, accumulate, **arguments):
    """Windows of ``accumulate`` batches of a Stepper, short at the end of each of ``num`` epochs."""
    policy += " on_overflow=skip" if "fp16" in policy else ""
    stepper = Stepper(model, optimizer, policy, accumulate=accumulate, **arguments)
    reports = []
    for _ in range(num):
        for batch in loader(size):
            reports.append(stepper.step(lambda batch=batch: loss_of(model, batch)))
        reports.append(stepper.flush())
    return [report.to_dict() for report in reports if report]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
def test_the_loop_of_the_guide_is_a_steppers_loop(policy, fused):
    """A short window ends each epoch. The division by 4 is exact, so that the bits are the same."""
    theirs = net()
    their_optimizer = adamw(theirs, fused)
    their_scheduler = torch.optim.lr_scheduler.LinearLR(their_optimizer, total_iters=10)
    expected = twin(policy, theirs, their_optimizer, 2, 6, 4, max_norm=0.5, scheduler=their_scheduler)
    accelerator, model = accelerator_for(policy, 4), net()
    optimizer = adamw(model, fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(6), scheduler)
    reports = []
    for _ in range(2):
        reports += train(accelerator, model, optimizer, batches, 0.5, scheduler)
    assert reports == expected
    assert len(expected) == 4
    assert torch.equal(weights(model), weights(theirs))
    assert scheduler.get_last_lr() == their_scheduler.get_last_lr()


def test_a_window_over_the_end_of_an_epoch_goes_on_in_the_next():
    theirs = net()
    stepper = Stepper(theirs, adamw(theirs), "bf16", accumulate=4)
    expected = [stepper.step(lambda batch=batch: loss_of(theirs, batch)) for _ in range(2) for batch in loader(6)]
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, policy="bf16", gradient_accumulation_plugin=plugin)
    model = net()
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader(6))
    reports = []
    for _ in range(2):
        reports += train(accelerator, model, optimizer, batches)
    assert reports == [report.to_dict() for report in expected if report]
    assert len(reports) == 3
    assert torch.equal(weights(model), weights(theirs))


def test_a_loop_that_accumulates_by_hand():
    """Without accumulate() each step() ends a window, and the loop divides as it likes."""
    theirs, model = net(), net()
    expected = twin("bf16", theirs, adamw(theirs), 1, 4, 2)
    accelerator = accelerator_for("bf16")
    model, optimizer = accelerator.prepare(model, adamw(model))
    reports = []
    for i, batch in enumerate(loader(4)):
        accelerator.backward(loss_of(model, batch) / 2)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            reports.append(optimizer.report.to_dict())
    assert reports == expected
    assert torch.equal(weights(model), weights(theirs))


def test_two_losses_of_one_pass():
    """Plain torch in the same region: two backward passes, one step."""
    theirs, model = net(), net()
    their_optimizer, accelerator = adamw(theirs), accelerator_for("bf16")
    model, optimizer = accelerator.prepare(model, adamw(model))
    bf16 = halfstep.Region(theirs, "bf16")
    for batch in loader(3):
        with bf16:
            out = theirs(batch[0]).float()
        losses = F.cross_entropy(out, batch[1]), out.square().mean()
        with bf16.backward():
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).norm().item()
        their_optimizer.step()
        their_optimizer.zero_grad()
        out = model(batch[0])
        accelerator.backward(F.cross_entropy(out, batch[1]), retain_graph=True)
        accelerator.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.report.loss == sum(losses).item()
        assert optimizer.report.grad_norm == pytest.approx(norm, rel=1e-6)  # another order of sums in fp32
    assert torch.equal(weights(model), weights(theirs))


def test_outputs_are_fp32_and_the_products_are_not():
    accelerator, model = accelerator_for("bf16"), net()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, _ = accelerator.prepare(model, adamw(model))
    x = torch.randn(2, 8)
    assert model(x).dtype == torch.float32
    with torch.no_grad():
        assert model(x).dtype == torch.float32
    assert accelerator.unwrap_model(model)(x).dtype == torch.float32
    assert seen == [torch.bfloat16] * 3


def test_validation_between_windows_changes_nothing():
    """Under no_grad, and by a loop that forgot it, which begins a micro-batch that nobody ends."""
    theirs, model = net(), net()
    expected = twin("bf16", theirs, adamw(theirs), 1, 4, 2)
    accelerator = accelerator_for("bf16", 2, keep_casts=True)
    model, optimizer = accelerator.prepare(model, adamw(model))
    reports = []
    for i, batch in enumerate(loader(4)):
        reports += train(accelerator, model, optimizer, [batch])
        model.eval()
        with torch.no_grad():
            value = loss_of(model, batch)
        if i % 2 == 0:
            assert torch.equal(value, loss_of(model, batch))
        model.train()
    assert reports == expected
    assert torch.equal(weights(model), weights(theirs))


def test_unscaled_gradients_are_true_and_a_second_time_changes_nothing():
    accelerator, model = accelerator_for("fp16 scale.init=1024", 2), net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    batches = list(loader(2))
    true = torch.autograd.grad(sum(loss_of(model, batch) for batch in batches) / 2, list(model.parameters()))
    for i, batch in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if i == 0:
                with pytest.raises(HalfstepError, match="before the last micro-batch"):
                    accelerator.unscale_gradients()
                continue
            accelerator.unscale_gradients(optimizer)
            accelerator.unscale_gradients()
            for parameter, gradient in zip(model.parameters(), true, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=0.02, atol=1e-4)  # products in fp16
            optimizer.step()
    assert optimizer.report.applied


@pytest.mark.parametrize("kind", ["part", "inf", "value"])
def test_other_ways_of_clipping_clip_the_true_gradient(kind):
    """Plain torch over the gradients of the same region, in fp32, which a loss scale leaves as they are."""
    theirs, model = net(), net()
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    accelerator = accelerator_for("fp16 scale.init=1024")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader(3):
        with halfstep.Region(theirs, "fp16 on_overflow=skip"):
            loss = loss_of(theirs, batch)
        (loss * 1024).backward()
        for parameter in theirs.parameters():
            parameter.grad /= 1024
        accelerator.backward(loss_of(model, batch))
        norms = []
        for each, clip in ((theirs, nn.utils.clip_grad_norm_), (model, accelerator.clip_grad_norm_)):
            if kind == "value":
                by_value = nn.utils.clip_grad_value_ if each is theirs else accelerator.clip_grad_value_
                by_value(each.parameters(), 0.01)
            elif kind == "part":
                norms.append((clip(each[0].parameters(), 0.1), clip(each[2].parameters(), 0.05)))
            else:
                norms.append(clip(each.parameters(), 0.05, norm_type=float("inf")))
        assert len(norms) in (0, 2)
        if norms:
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        their_optimizer.step()
        their_optimizer.zero_grad()
        assert optimizer.report.applied
    torch.testing.assert_close(weights(model), weights(theirs), rtol=1e-6, atol=1e-7)


def test_a_window_that_nobody_clips_is_not_clipped():
    accelerator, model = accelerator_for("bf16"), net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    first, second = loader(2)
    train(accelerator, model, optimizer, [first], max_norm=1e-3)
    before = weights(model)
    (report,) = train(accelerator, model, optimizer, [second])
    moved = (weights(model) - before).norm().item()
    assert moved == pytest.approx(report["grad_norm"], rel=1e-4)


def test_a_clip_before_the_last_micro_batch_gives_the_norm_so_far_and_clips_nothing():
    theirs, model = net(), net()
    expected = twin("fp16 scale.init=1024", theirs, adamw(theirs), 1, 2, 2)
    accelerator = accelerator_for("fp16 scale.init=1024", 2)
    model, optimizer = accelerator.prepare(model, adamw(model))
    norms = []
    for batch in loader(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.report.to_dict() == expected[0]
    assert norms[1] == expected[0]["grad_norm"]
    fresh = net()
    stepper = Stepper(fresh, adamw(fresh), "fp16 scale.init=1024 on_overflow=skip")
    alone = stepper.step(lambda: loss_of(fresh, next(iter(loader(2)))))
    assert norms[0] == pytest.approx(alone.grad_norm, rel=1e-6)  # fp32


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
def test_an_overflow_is_skipped_and_the_scheduler_and_the_statistics_wait(fused):
    """A fused optimizer decides on the device; Accelerate's own wrapper never hears of it."""
    accelerator, model = accelerator_for("fp16 scale.init=65536"), Normed()
    optimizer = adamw(model, fused)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = next(iter(loader(1)))
    before, statistics = weights(model), model.layers[1].running_mean.clone()
    for big, skipped in ((1e3, True), (1.0, False)):
        accelerator.backward(F.cross_entropy(model(x), y) * big)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is skipped
        assert torch.equal(weights(model), before) is skipped
        assert torch.equal(model.layers[1].running_mean, statistics) is skipped
        assert scheduler.get_last_lr() == [0.005 if skipped else 0.01]
    assert optimizer.report.scale == 32768


def test_an_exception_in_a_forward_pass_closes_its_region():
    accelerator, model = accelerator_for("bf16"), net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3))
    assert region._opened == []
    train(accelerator, model, optimizer, loader(1))


def test_an_interrupted_forward_pass_is_closed_before_the_next_loss():
    accelerator, model = accelerator_for("bf16"), net()
    handle = model[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    model, optimizer = accelerator.prepare(model, adamw(model))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 8))
    handle.remove()
    train(accelerator, model, optimizer, loader(1))
    assert region._opened == []


class Twice(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x, again=True):
        return self.layer(self(x, again=False) if again else x)


def test_calls_inside_calls_and_several_calls_of_a_micro_batch():
    theirs, model = Twice(), Twice()
    stepper, accelerator = Stepper(theirs, adamw(theirs), "bf16"), accelerator_for("bf16")
    model, optimizer = accelerator.prepare(model, adamw(model))
    x = torch.randn(4, 8)
    expected = stepper.step(lambda: (theirs(x).float() + theirs(2 * x).float()).square().mean())
    accelerator.backward((model(x) + model(2 * x)).square().mean())
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(expected.loss, rel=2**-7)  # inner results pass as fp32, no more bits
    assert region._opened == []


def test_a_compiled_model():
    theirs, model = net(), net()
    expected = twin("bf16", theirs, adamw(theirs), 1, 2, 1)
    accelerator = accelerator_for("bf16")
    optimizer = adamw(model)
    model, optimizer = accelerator.prepare(torch.compile(model, backend="eager", fullgraph=True), optimizer)
    assert train(accelerator, model, optimizer, loader(2)) == expected
    assert accelerator.unwrap_model(model) is model._orig_mod or accelerator.unwrap_model(model) is model


def test_autocast_is_the_region_and_a_part_of_it_can_be_without():
    accelerator, model = accelerator_for("bf16"), net()
    model, _ = accelerator.prepare(model, adamw(model))
    x = torch.randn(2, 8)
    with accelerator.autocast():
        assert F.linear(x, x).dtype == torch.bfloat16
        assert x.softmax(-1).dtype == torch.float32
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert F.linear(x, x).dtype == torch.float32


def test_a_model_for_evaluation_alone_computes_in_the_policys_formats():
    accelerator, model = accelerator_for("bf16"), net()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = accelerator.prepare(model)
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert seen == [torch.bfloat16]
    assert accelerator.info.effective == "bf16"


def test_a_copy_of_a_prepared_model_opens_regions_too_and_a_pickle_is_refused():
    accelerator, model = accelerator_for("bf16"), net()
    prepared, _ = accelerator.prepare(model, adamw(model))
    average = copy.deepcopy(prepared)
    seen = []
    average[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.no_grad():
        assert average(torch.randn(2, 8)).dtype == torch.float32
    assert seen == [torch.bfloat16]
    with pytest.raises(HalfstepError, match="keep_fp32_wrapper=False"):
        pickle.dumps(prepared)
    plain = pickle.loads(pickle.dumps(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)))
    assert torch.equal(weights(plain), weights(model))


def test_free_memory_ends_a_training_and_the_next_one_begins_anew():
    theirs = net()
    expected = twin("bf16", theirs, adamw(theirs), 1, 2, 1)
    accelerator, model = accelerator_for("bf16"), net()
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    assert train(accelerator, prepared, optimizer, loader(2)) == expected
    accelerator.free_memory(optimizer)
    assert model(torch.randn(2, 8)).dtype == torch.float32
    assert not model._forward_pre_hooks
    other = net()
    prepared, optimizer = accelerator.prepare(other, adamw(other))
    assert train(accelerator, prepared, optimizer, loader(2)) == expected


def test_log_sinks_and_reports(tmp_path):
    told = []
    accelerator, model = accelerator_for("bf16", log=tmp_path / "run", sinks=[told.append]), net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert optimizer.report is None
    train(accelerator, model, optimizer, loader(3))
    accelerator.free_memory()
    assert [report.step for report in told] == [1, 2, 3]
    assert any((tmp_path / "run").iterdir())


# What is asked for.


@pytest.mark.parametrize(
    ("arguments", "launched", "requested"),
    [
        ({}, None, "auto"),
        ({}, "no", "auto"),
        ({}, "fp16", "fp16"),
        ({"mixed_precision": "bf16"}, None, "bf16"),
        ({"mixed_precision": "no"}, None, "fp32"),
        ({"policy": "bf16", "mixed_precision": "no"}, None, "bf16"),
        ({"policy": "bf16", "mixed_precision": "bf16"}, "bf16", "bf16"),
        ({"mixed_precision": "fp16"}, "bf16", "fp16"),
    ],
)
def test_what_is_asked_for(arguments, launched, requested, monkeypatch):
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    accelerator, model = Accelerator(cpu=True, **arguments), net()
    accelerator.prepare(model, adamw(model))
    assert accelerator.info.requested == requested


def test_a_launcher_that_says_otherwise_is_overridden_aloud(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.warns(UserWarning, match="policy='fp16' of the script stands, and not --mixed_precision bf16"):
        Accelerator(cpu=True, policy="fp16")


def test_a_plain_loop_says_that_it_cannot_replay():
    accelerator, model = accelerator_for("fp16"), net()
    accelerator.prepare(model, adamw(model))
    assert accelerator.info.requested == "fp16"
    assert accelerator.info.effective == "fp16 on_overflow=skip"
    assert "cannot run a micro-batch again" in accelerator.info.reason


REFUSED = {
    "two formats": (lambda: Accelerator(cpu=True, policy="bf16", mixed_precision="fp16"), "two formats"),
    "fp8": (lambda: Accelerator(cpu=True, mixed_precision="fp8"), "no products in fp8"),
    "scaler settings": (lambda: Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs()]), "loss scale is the pol"),
    "autocast settings": (lambda: Accelerator(cpu=True, kwargs_handlers=[AutocastKwargs()]), "region is the policy's"),
    "nothing prepared": (lambda: accelerator_for("bf16").stepper, "without a model and an optimizer"),
    "no model": (lambda: accelerator_for("bf16").info, "without a model"),
    "LBFGS": (lambda: accelerator_for("bf16").prepare(torch.optim.LBFGS(net().parameters())), "evaluates the loss"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    call, match = REFUSED[case]
    with pytest.raises(HalfstepError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_accelerator_of_another_kind_in_the_process():
    accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(HalfstepError, match="one setting for a process"):
        accelerator_for("bf16")


def test_a_model_that_accelerate_has_wrapped():
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(net())
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(HalfstepError, match="opens a region of its own"):
        accelerator_for("bf16").prepare(model)


def test_an_optimizer_of_another_accelerator():
    model = net()
    optimizer = accelerate.Accelerator(cpu=True).prepare(adamw(model))
    with pytest.raises(HalfstepError, match="another Accelerator has prepared"):
        accelerator_for("bf16").prepare(model, optimizer)


def loop():
    accelerator, model = accelerator_for("fp16"), net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return accelerator, model, optimizer


def test_a_scaler_beside_it():
    accelerator, model, optimizer = loop()
    scaler = torch.amp.GradScaler("cpu")
    accelerator.backward(scaler.scale(loss_of(model, next(iter(loader(1))))))
    with pytest.raises(HalfstepError, match="Leave the GradScaler out"):
        scaler.step(optimizer)


def test_a_loss_that_no_region_has_seen():
    accelerator, model, _ = loop()
    with pytest.raises(HalfstepError, match="without a call of a prepared model"):
        accelerator.backward(model.forward(torch.randn(2, 8)).square().mean())


def test_closures_and_arguments_that_backward_cannot_take():
    accelerator, model, optimizer = loop()
    loss = loss_of(model, next(iter(loader(1))))
    with pytest.raises(HalfstepError, match=r"backward\(create_graph"):
        accelerator.backward(loss, create_graph=True)
    with pytest.raises(HalfstepError, match=r"step\(closure\)"):
        optimizer.step(lambda: loss)
    with pytest.raises(HalfstepError, match="without a gradient"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_true_gradients_of_16_bit_weights_are_refused():
    accelerator, model = accelerator_for("bf16 master=split16"), net()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, next(iter(loader(1)))))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0
    for call in (
        accelerator.unscale_gradients,
        lambda: accelerator.clip_grad_norm_(model[0].parameters(), 1.0),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
    ):
        with pytest.raises(HalfstepError, match="rounded to 16 bit"):
            call()


def test_a_policy_that_would_have_to_run_a_step_again():
    accelerator, model = accelerator_for("fp16 on_exhausted=promote"), net()
    accelerator.prepare(model, adamw(model))
    with pytest.raises(HalfstepError, match="without a closure"):
        assert accelerator.info


def test_a_loop_that_clears_gradients_first_hears_what_it_drops():
    accelerator, model = accelerator_for("bf16", 3), net()
    model, optimizer = accelerator.prepare(model, adamw(model))

    def epoch():
        for batch in loader(6):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, batch))
                optimizer.step()

    with pytest.warns(UserWarning, match="dropped 2 of the 3 micro-batches"):
        epoch()
    epoch()  # once is enough


def test_half_weights_are_refused_by_name_when_the_first_pass_runs():
    accelerator, model = accelerator_for("fp16"), net().half()
    model, _ = accelerator.prepare(model, adamw(model))
    with pytest.raises(HalfstepError, match=r"parameter 0.weight .* in float16"):
        model(torch.randn(2, 8))


def test_another_model_to_train_after_the_first_pass():
    accelerator, model, optimizer = loop()
    train(accelerator, model, optimizer, loader(1))
    other = net()
    other, _ = accelerator.prepare(other, adamw(other))
    with pytest.raises(HalfstepError, match="where a Stepper is at work"):
        other(torch.randn(2, 8))


# What Accelerate does in the same place: rows of docs/accelerate.md.


def plain(mixed_precision, accumulate=1):
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate
    )
    model = net()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader(6))


def test_accelerate_divides_a_short_window_by_the_full_number():
    accelerator, model, optimizer, batches = plain("no", 4)
    for i, batch in enumerate(batches):
        if i == 4:
            before = weights(model)
            true = torch.autograd.grad(
                sum(loss_of(model, each) for each in list(loader(6))[4:]) / 2, list(model.parameters())
            )
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    moved = before - weights(model)
    torch.testing.assert_close(moved, torch.cat([g.flatten() for g in true]) / 2, rtol=1e-4, atol=1e-7)


def test_accelerate_writes_a_nan_of_bf16_into_the_weights():
    accelerator, model, optimizer, batches = plain("bf16")
    accelerator.backward(loss_of(model, next(iter(batches))) * float("nan"))
    optimizer.step()
    assert weights(model).isnan().all()
    assert not accelerator.optimizer_step_was_skipped


def test_accelerate_computes_fp16_in_fp32_on_a_cpu():
    accelerator, model, _, batches = plain("fp16")
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loss_of(model, next(iter(batches)))
    assert seen == [torch.float32]
    assert accelerator.scaler is None
