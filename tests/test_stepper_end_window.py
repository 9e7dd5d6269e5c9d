"""Windows that the caller ends, as a framework's loop does, and two optimizers that share a loss scale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import HalfstepError, Stepper

POLICIES = ["fp32", "bf16", "fp16 on_overflow=skip", "fp16"]


def make(fused=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def batches(num):
    torch.manual_seed(1)
    return [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(num)]


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["closure", "forward"])
def test_a_window_that_the_caller_ends_is_the_window_of_a_fixed_length(policy, way):
    ours, theirs = make(), make()
    fixed = Stepper(*theirs, policy, accumulate=2, max_norm=0.5)
    free = Stepper(*ours, policy, accumulate=None)
    for i, batch in enumerate(batches(6)):
        expected = fixed.step(lambda batch=batch: loss_of(theirs[0], batch))
        if way == "closure":
            assert free.step(lambda batch=batch: loss_of(ours[0], batch), is_last=i % 2 == 1) is None
        else:
            with free.forward(is_last=i % 2 == 1):
                loss = loss_of(ours[0], batch)
            assert free.backward(loss) is None
        if i % 2:
            norm = free.gradient_norm(0.5)
            report = free.end_window()
            assert report.to_dict() == expected.to_dict()
            assert norm.item() == expected.grad_norm
    assert torch.equal(weights(ours[0]), weights(theirs[0]))


def test_shares_of_a_loss_add_up_where_only_one_of_them_counts():
    """What a loop that divides by itself passes: (loss / n, 0) and at last (loss / n, 1)."""
    ours, theirs = make(), make()
    fixed = Stepper(*theirs, "bf16", accumulate=4)
    free = Stepper(*ours, "bf16", accumulate=None)
    for i, batch in enumerate(batches(4)):
        expected = fixed.step(lambda batch=batch: loss_of(theirs[0], batch))
        free.step(lambda batch=batch, i=i: (loss_of(ours[0], batch) / 4, float(i == 3)))
    report = free.end_window()
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)  # four roundings of fp32
    torch.testing.assert_close(weights(ours[0]), weights(theirs[0]), rtol=1e-6, atol=1e-7)


def test_a_loop_that_has_divided_by_itself_says_so_at_the_end():
    """Two losses of one micro-batch, and a short window that was divided by more than it holds."""
    ours, theirs = make(), make()
    fixed = Stepper(*theirs, "fp16 on_overflow=skip", accumulate=1, max_norm=0.5)
    free = Stepper(*ours, "fp16 on_overflow=skip", accumulate=None)
    batch = batches(1)[0]
    expected = fixed.step(lambda: 2 * loss_of(theirs[0], batch))
    with free.forward():
        loss = loss_of(ours[0], batch) / 4
    free.backward(loss, retain_graph=True)
    free.backward(loss)
    assert free.gradient_norm(0.5, count=0.25).item() == expected.grad_norm
    assert free.end_window(count=0.25).to_dict() == expected.to_dict()
    assert torch.equal(weights(ours[0]), weights(theirs[0]))


def test_end_window_of_nothing_is_refused():
    stepper = Stepper(*make(), "bf16", accumulate=None)
    with pytest.raises(HalfstepError, match="holds nothing"):
        stepper.end_window()
    assert stepper.flush() is None


def test_drop_forgets_the_window():
    ours, theirs = make(), make()
    free, other = Stepper(*ours, "bf16", accumulate=None), Stepper(*theirs, "bf16", accumulate=None)
    first, second = batches(2)
    free.step(lambda: loss_of(ours[0], first))
    free.drop()
    for stepper, model in ((free, ours[0]), (other, theirs[0])):
        stepper.step(lambda model=model: loss_of(model, second))
    assert free.end_window().to_dict() == other.end_window().to_dict()
    assert torch.equal(weights(ours[0]), weights(theirs[0]))


def test_a_second_pass_of_a_micro_batch_drops_nothing():
    model, optimizer = make()
    stepper = Stepper(model, optimizer, "bf16", accumulate=None)
    first, second = batches(2)
    with stepper.forward():
        loss = loss_of(model, first)
    with stepper.forward():
        loss = loss + loss_of(model, second)
    stepper.backward(loss)
    expected = loss.item()
    assert stepper.end_window().loss == expected


class Pair(nn.Module):
    """A generator and a discriminator in one module, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(4, 8), nn.Linear(8, 1)


def pair(policy, num=2):
    torch.manual_seed(0)
    model = Pair()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.d, model.g)]
    first = Stepper(model, optimizers[0], policy, accumulate=None)
    return model, [first, Stepper(model, optimizers[1], accumulate=None, beside=first)][:num]


def losses(model, z):
    d = F.softplus(model.d(model.g(z).detach())).mean()
    g = F.softplus(-model.d(model.g(z))).mean()
    return d, g


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 on_overflow=skip"])
def test_two_optimizers_take_turns_as_two_loops_would(policy):
    model, (d, g) = pair(policy)
    twin, _ = pair(policy, 1)
    z = torch.randn(16, 4)
    for _ in range(3):
        for stepper, part, i in ((d, "d", 0), (g, "g", 1)):
            with d.forward():
                loss = losses(model, z)[i]
            stepper.drop()  # zero_grad
            d.backward(loss)
            expected = loss.item()
            assert stepper.end_window().loss == expected
            # Plain SGD on the same gradient, in the same formats.
            with halfstep.Region(twin, policy):
                loss = losses(twin, z)[i]
            parameters = list(getattr(twin, part).parameters())
            gradients = torch.autograd.grad(loss * d.scale.value, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.1 * (gradient / d.scale.value)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-6, atol=1e-7)  # fp32, six steps


def test_both_losses_before_either_step_at_a_scale_that_falls_in_between():
    """The first optimizer overflows, which halves the scale; what the second holds was scaled by the old one."""
    model, (d, g) = pair("fp16 scale=dynamic scale.init=1024 on_overflow=skip")
    z = torch.randn(16, 4)
    with d.forward():
        loss = losses(model, z)[1]
    true = torch.autograd.grad(loss * 1024, list(model.g.parameters()), retain_graph=True)
    d.backward(loss)
    model.d.weight.grad.fill_(float("inf"))
    before = weights(model.g).clone()
    assert not d.end_window().applied
    assert d.scale.value.item() == 512
    report = g.end_window()
    assert report.applied
    step = torch.cat([gradient.flatten() for gradient in true]) / 1024 * 0.1
    torch.testing.assert_close(weights(model.g), before - step, rtol=1e-6, atol=1e-7)


def test_a_loss_counts_for_both_until_one_of_them_steps():
    model, (d, g) = pair("bf16")
    z = torch.randn(16, 4)
    values = []
    with d.forward():
        for loss in losses(model, z):
            d.backward(loss)
            values.append(loss.item())
    assert d.end_window().loss == pytest.approx(sum(values), rel=1e-6)
    assert g.end_window().loss == pytest.approx(sum(values), rel=1e-6)
    with d.forward():
        loss = losses(model, z)[0]
    d.backward(loss)
    expected = loss.item()
    assert d.end_window().loss == expected
    with d.forward():
        loss = losses(model, z)[1]
    d.backward(loss)
    expected = loss.item()
    assert g.end_window().loss == expected


def test_a_stepper_beside_another_refuses_what_it_cannot_tell_apart():
    model, (d, _) = pair("bf16")
    with pytest.raises(HalfstepError, match="beside another"):
        d.step(lambda: losses(model, torch.randn(2, 4))[0])
    with pytest.raises(HalfstepError, match="accumulate=None"):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), beside=d)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 on_overflow=skip"])
def test_unscaled_gradients_are_the_true_ones_and_may_be_changed(policy):
    """A clip by value, which the one factor cannot do, against the same done by hand."""
    ours, theirs = make(), make()
    free, twin = Stepper(*ours, policy, accumulate=None), Stepper(*theirs, policy)
    for batch in batches(3):
        free.step(lambda batch=batch: loss_of(ours[0], batch))
        assert free.unscale()
        with halfstep.Region(theirs[0], policy):
            loss = loss_of(theirs[0], batch)
        scale = twin.scale.value
        true = [g / scale for g in torch.autograd.grad(loss * scale, list(theirs[0].parameters()))]
        norm = torch.cat([g.flatten() for g in true]).norm().item()
        for parameter, gradient in zip(ours[0].parameters(), true, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
            parameter.grad.clamp_(-0.01, 0.01)
        for parameter, gradient in zip(theirs[0].parameters(), true, strict=True):
            parameter.grad = gradient.clamp(-0.01, 0.01)
        report = free.end_window()
        assert (report.loss, report.applied) == (loss.item(), True)
        assert report.grad_norm == pytest.approx(norm, rel=1e-6)  # of the true one, before the clip
        theirs[1].step()
    assert torch.equal(weights(ours[0]), weights(theirs[0]))


def test_an_overflow_that_a_clip_by_value_makes_a_number_of_is_skipped_all_the_same():
    model, optimizer = make()
    stepper = Stepper(model, optimizer, "fp16 scale.init=1024 on_overflow=skip", accumulate=None)
    before = weights(model).clone()
    stepper.step(lambda: loss_of(model, batches(1)[0]))
    model[0].weight.grad[0, 0] = float("inf")
    assert not stepper.unscale()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    report = stepper.end_window()
    assert not report.applied
    assert report.grad_norm == float("inf")
    assert stepper.scale.value.item() == 512
    assert torch.equal(weights(model), before)


def test_what_somebody_makes_of_an_unscaled_gradient_is_judged_too():
    model, optimizer = make()
    stepper = Stepper(model, optimizer, "fp16 scale.init=1024 on_overflow=skip", accumulate=None)
    stepper.step(lambda: loss_of(model, batches(1)[0]))
    stepper.unscale()
    model[0].weight.grad[0, 0] = float("nan")
    report = stepper.end_window()
    assert not report.applied
    assert report.grad_norm != report.grad_norm
    assert stepper.scale.value.item() == 1024  # no loss scale has a part in it


def test_a_loss_between_unscale_and_the_end_is_refused():
    model, optimizer = make()
    stepper = Stepper(model, optimizer, "bf16", accumulate=None)
    batch = batches(1)[0]
    stepper.step(lambda: loss_of(model, batch))
    stepper.unscale()
    with stepper.forward():
        loss = loss_of(model, batch)
    with pytest.raises(HalfstepError, match=r"after unscale\(\)"):
        stepper.backward(loss)


def test_unscaled_gradients_of_the_other_one_stay_when_the_scale_falls():
    model, (d, g) = pair("fp16 scale=dynamic scale.init=1024 on_overflow=skip")
    with d.forward():
        loss = losses(model, torch.randn(16, 4))[1]
    d.backward(loss)
    g.unscale()
    true = model.g.weight.grad.clone()
    model.d.weight.grad.fill_(float("inf"))
    assert not d.end_window().applied
    assert torch.equal(model.g.weight.grad, true)


def test_a_stepper_that_comes_when_the_window_is_open_takes_part_in_it():
    """Of several over the same parameters each gradient is rescaled once."""
    model, (first,) = pair("fp16 scale=dynamic scale.init=1024 on_overflow=skip", 1)
    twin, (d, g) = pair("fp16 scale=dynamic scale.init=1024 on_overflow=skip")
    everything = torch.optim.SGD(model.parameters(), lr=0.0)
    first = Stepper(model, everything, "fp16 scale=dynamic scale.init=1024 on_overflow=skip", accumulate=None)
    z = torch.randn(16, 4)
    for stepper, net in ((first, model), (d, twin)):
        with stepper.forward():
            loss = losses(net, z)[1]
        stepper.backward(loss)
        net.d.weight.grad.fill_(float("inf"))
    late = [
        Stepper(model, torch.optim.SGD(part.parameters(), lr=0.1), accumulate=None, beside=first)
        for part in (model.d, model.g)
    ]
    assert late[0].end_window().to_dict() == d.end_window().to_dict()
    assert late[1].end_window().to_dict() == g.end_window().to_dict()
    assert torch.equal(weights(model), weights(twin))


def test_a_scale_that_is_exhausted_asks_for_the_loss_once_more_and_names_the_module():
    model, optimizer = make(fused=False)
    stepper = Stepper(model, optimizer, "fp16 scale.init=1 scale.floor=1 on_overflow=skip", accumulate=None)
    batch = batches(1)[0]
    asked = []

    def loss_once(again=False):
        asked.append(again)
        return loss_of(model, (batch[0] * 1e6, batch[1]))

    with stepper.forward():
        loss = loss_once()
    stepper.backward(loss, again=lambda: loss_once(True))
    assert asked == [False]
    with pytest.raises(halfstep.ScaleExhausted, match=r"module:0=fp32"):
        stepper.end_window()
    assert True in asked


@pytest.mark.parametrize("said", [[True], [False, True], [True, False]])
def test_the_gradient_of_a_last_micro_batch_stays_in_16_bit_where_weights_do(said):
    """Sums take 4 bytes an element; where nothing is added, 2 are enough. One that was not the last is summed."""
    num = len(said)
    ours, theirs = make(), make()
    fixed = Stepper(*theirs, "bf16 master=split16", accumulate=num)
    free = Stepper(*ours, "bf16 master=split16", accumulate=None)
    for batch, is_last in zip(batches(num), said, strict=True):
        fixed.step(lambda batch=batch: loss_of(theirs[0], batch))
        free.step(lambda batch=batch: loss_of(ours[0], batch), is_last=is_last)
    assert ours[0][0].weight.grad.dtype is (torch.bfloat16 if num == 1 else torch.float32)
    free.end_window()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(free.weights(), fixed.weights(), strict=True))


def test_true_gradients_of_16_bit_ones_lose_nothing():
    """In fp16, what the scale held above its smallest number would be rounded again when it is taken away."""
    (model, optimizer), (twin, other) = make(), make()
    steppers = [
        Stepper(model, optimizer, "fp16 master=split16 scale.init=65536 on_overflow=skip", accumulate=None),
        Stepper(twin, other, "fp16 master=split16 scale.init=65536 on_overflow=skip", accumulate=1),
    ]
    batch = batches(1)[0]
    for _ in range(2):
        steppers[0].step(lambda: loss_of(model, batch) * 1e-3, is_last=True)
        steppers[0].unscale()
        assert model[0].weight.grad.dtype is torch.float32
        steppers[0].end_window()
        steppers[1].step(lambda: loss_of(twin, batch) * 1e-3)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(steppers[0].weights(), steppers[1].weights(), strict=True))
