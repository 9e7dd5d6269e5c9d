"""GradScaler against torch's over the same gradients: weights, states, scale, and what it costs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch._dynamo.testing
from reference.reads import Reads
from reference.scaler import Scaler
from reference.scaler_loop import INF, OPTIMIZERS, TORCH, Loop, draws, every_optimizer, every_stage
from torch import nn

from halfstep import grad_scaler
from halfstep.grad_scaler import GradScaler

# --- the same as torch's -------------------------------------------------------------------------------------------


@every_optimizer
@every_stage
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 0.3), (4.0, 0.9)])
def test_between_the_bounds_every_bit_is_torchs(optimizer, unscales, growth, backoff):
    kwargs = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": 3}
    verdicts = draws(f"{optimizer}{growth}", 0.25, 150)
    theirs, ours = Loop(TORCH, optimizer, **kwargs), Loop(GradScaler, optimizer, floor=1e-30, ceiling=1e30, **kwargs)
    scales = theirs.run(verdicts, unscales)
    assert ours.run(verdicts, unscales) == scales
    assert 1e-30 < min(scales) < max(scales) < 1e30
    assert all(map(torch.equal, ours.result(), theirs.result()))
    assert theirs.scaler.state_dict().items() <= ours.scaler.state_dict().items()


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_sequence_is_the_twins(share, hysteresis, monkeypatch):
    monkeypatch.setattr(grad_scaler, "_STOP_AFTER", 10**6)
    kwargs = {"floor": 4.0, "ceiling": 2.0**11, "hysteresis": hysteresis}
    twin = Scaler(256.0, interval=4, **kwargs)
    loop = Loop(init_scale=256.0, growth_interval=4, **kwargs)
    for bad in draws(f"{share}{hysteresis}", share, 400):
        loop.run([bad])
        twin.update(bad)
        state = loop.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"], state["_num_overflows"]) == (
            twin.scale, twin.num_clean, twin.num_overflows,
        )  # fmt: skip


@every_stage
def test_retval_args_and_instance(unscales):
    class Echo(torch.optim.SGD):
        def step(self, *args, **kwargs):
            super().step()
            return args, kwargs

    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = Echo([weight], lr=0.1), GradScaler("cpu")
    assert isinstance(scaler, TORCH)
    scaler.scale(weight.sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer, None, x=3) == ((None,), {"x": 3})


def test_lists_and_generators_of_losses_are_scaled():
    scaler = GradScaler("cpu", init_scale=8.0)
    one = torch.ones(())
    assert [x.item() for x in scaler.scale([one, one * 2])] == [8.0, 16.0]
    assert isinstance(scaler.scale((one,)), tuple)
    assert [x.item() for x in scaler.scale(x for x in (one,))] == [8.0]
    with pytest.raises(ValueError, match="outputs must be a Tensor"):
        scaler.scale(3)


def test_settings_can_be_read_and_set_as_in_torch():
    scaler = GradScaler("cpu", 4.0, 3.0, 0.25, 7, True)
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (4.0, 3.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)
    scaler.set_growth_factor(2.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(1)
    loop = Loop()
    loop.scaler = scaler
    assert loop.run([False, True, False]) == [8.0, 4.0, 8.0]


def test_disabled_passes_everything_on():
    loop = Loop(enabled=False)
    scaler = loop.scaler
    assert scaler.last_step_applied is None
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    loop.step()
    assert scaler.last_step_applied
    assert scaler.step_applied(loop.optimizer)
    scaler.unscale_(loop.optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert copy.deepcopy(scaler).is_enabled() is False
    assert torch.equal(loop.weight, torch.full((3,), 0.9))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA, so nothing is switched off")
def test_without_cuda_the_default_device_is_switched_off_as_in_torch():
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling"):
        scaler = GradScaler()
    assert not scaler.is_enabled()


@pytest.mark.parametrize(("kwargs", "text"), [({"growth_factor": 1.0}, "growth"), ({"backoff_factor": 1.0}, "backoff")])
def test_factors_that_torch_refuses(kwargs, text):
    with pytest.raises(AssertionError, match=text):
        GradScaler("cpu", **kwargs)


# --- flags and gradients of other kinds ----------------------------------------------------------------------------


@pytest.fixture
def two_devices(monkeypatch):
    """The same flag as of two devices, as of a model that is spread over them."""
    own = TORCH._unscale_grads_

    def twice(self, *args):
        found = own(self, *args)
        return {torch.device("cpu", i): flag.clone() for i in range(2) for flag in found.values()}

    monkeypatch.setattr(TORCH, "_unscale_grads_", twice)


@every_optimizer
@every_stage
@pytest.mark.usefixtures("two_devices")
def test_overflows_on_two_devices_skip_once(optimizer, unscales):
    loop = Loop(optimizer=optimizer, hysteresis=2)
    assert loop.run([True, False, True, True], unscales) == [2.0**16] * 3 + [2.0**15]
    assert loop.scaler.state_dict()["_num_overflows"] == 2
    assert all(value.isfinite().all() for value in loop.result())
    assert loop.scaler.last_step_applied is False


@pytest.mark.usefixtures("two_devices")
def test_torch_applies_it():
    """The fault that the flag of one is there for."""
    loop = Loop(TORCH, "fused adamw")
    loop.step(True)
    assert loop.weight.isnan().any()


@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
def test_flags_that_a_script_summed_over_ranks_count_once(optimizer):
    loop = Loop(optimizer=optimizer, hysteresis=3)
    for _ in range(2):
        loop.scaler.scale(loop.weight.sum()).backward()
        loop.scaler.unscale_(loop.optimizer)
        for flag in loop.scaler._found_inf_per_device(loop.optimizer).values():
            flag.fill_(8.0)
        loop.scaler.step(loop.optimizer)
        assert loop.scaler.last_step_applied is False
        loop.scaler.update()
    assert torch.equal(loop.weight, torch.ones(3))
    assert loop.scaler.state_dict()["_num_overflows"] == 2


@pytest.mark.parametrize("num_bad", [1, 3])
@every_stage
def test_fused_sgd_whose_first_steps_are_skipped_begins_with_a_clean_momentum(num_bad, unscales):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    loop = Loop()
    loop.weight, loop.optimizer = weight, optimizer
    scales = loop.run([True] * num_bad, unscales)
    assert loop.scaler.last_step_applied is False
    scales += loop.run([False, True, False], unscales)
    expected = Loop()
    assert expected.run([True] * num_bad + [False, True, False], unscales) == scales
    # Fused and plain SGD round alike here: 0.9 and 0.1 times 1.0 and 1.9, each a product and a sum in fp32.
    torch.testing.assert_close(weight, expected.weight, rtol=2**-22, atol=0.0)
    assert loop.scaler.last_step_applied is True


def run_odd_gradients(cls, kind):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD
    if kind == "sparse":
        model = nn.Embedding(6, 3, sparse=True)
        loss = lambda: model(torch.tensor([1, 1, 4])).square().sum()  # noqa: E731
    elif kind == "bf16":
        model = nn.Linear(4, 2).bfloat16()
        loss = lambda: model(torch.ones(3, 4, dtype=torch.bfloat16)).square().sum()  # noqa: E731
    elif kind == "bf16 and fp32":
        model = nn.ModuleList([nn.Linear(4, 2).bfloat16(), nn.Linear(2, 2)])
        loss = lambda: model[1](model[0](torch.ones(3, 4).bfloat16()).float()).square().sum()  # noqa: E731
    elif kind == "empty":
        model = nn.ParameterList([nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2))])
        loss = lambda: model[0].sum() + model[1].square().sum()  # noqa: E731
    elif kind == "some":
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        loss = lambda: model[0](torch.ones(2, 3)).square().sum()  # noqa: E731
    elif kind == "fp16 in a fused optimizer":
        model = nn.Linear(4, 2).half()
        optimizer = lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True, eps=1e-4)  # noqa: E731
        loss = lambda: model(torch.ones(3, 4, dtype=torch.float16)).float().square().mean()  # noqa: E731
    optimizer = optimizer(model.parameters(), lr=0.01)
    scaler = cls("cpu", init_scale=64.0, growth_interval=2)
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        if i == 3:
            last = [p for p in model.parameters() if p.grad is not None][-1]
            last.grad = last.grad * INF
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("kind", ["sparse", "bf16", "bf16 and fp32", "empty", "some", "fp16 in a fused optimizer"])
def test_gradients_of_other_kinds_as_in_torch(kind):
    (theirs, scale), (ours, own_scale) = run_odd_gradients(TORCH, kind), run_odd_gradients(GradScaler, kind)
    assert own_scale == scale == 128.0  # grown twice, lowered once
    assert all(map(torch.equal, ours, theirs))
    assert all(weight.isfinite().all() for weight in ours)


# --- what it costs -------------------------------------------------------------------------------------------------


@every_optimizer
@every_stage
@pytest.mark.parametrize("kwargs", [{}, {"hysteresis": 2, "floor": 4.0}])
def test_nothing_is_read_that_torch_does_not_read(optimizer, unscales, kwargs):
    verdicts = [False, True, False, False] + [True] * 19
    counts = []
    for loop in (Loop(TORCH, optimizer), Loop(GradScaler, optimizer, **kwargs)):
        loop.step()
        loop.scaler.update()
        counts.append([])
        for bad in verdicts:
            with Reads() as reads:
                loop.step(bad, unscales)
                loop.scaler.update()
            counts[-1].append(reads.num_reads)
    assert counts[0] == counts[1]
    assert (sum(counts[0]) == 0) == ("fused" in optimizer)


def test_a_fused_run_is_read_once_in_64_updates():
    loop = Loop(optimizer="fused adamw")
    counts = []
    for _ in range(130):
        with Reads() as reads:
            loop.step()
            loop.scaler.update()
        counts.append(reads.num_reads)
    assert [i + 1 for i, num in enumerate(counts) if num] == [64, 128]
    assert sum(counts) == 2


def test_asking_whether_a_fused_step_was_applied_reads_once():
    loop = Loop(optimizer="fused adamw")
    loop.step()
    with Reads() as reads:
        loop.scaler.last_step_applied  # noqa: B018
    assert reads.num_reads == 1


@pytest.mark.parametrize("begins_inside", [False, True])
def test_a_compiled_scale_is_not_compiled_again_when_it_changes(begins_inside):
    loop = Loop(growth_interval=1)
    if not begins_inside:
        loop.scaler.scale(torch.ones(()))
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def scaled(weight):
        return loop.scaler.scale(weight.square().sum())

    for bad in (False, True, True, False, True):
        loop.optimizer.zero_grad()
        result = scaled(loop.weight)
        assert result.item() == loop.weight.detach().square().sum().item() * loop.scaler.get_scale()
        result.backward()
        if bad:
            loop.weight.grad[0] = INF
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    assert counter.frame_count == 1 + begins_inside  # once more after its tensors came into being


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
def test_a_fused_step_on_a_gpu_never_waits(optimizer):
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer, scaler = OPTIMIZERS[optimizer]([weight]), GradScaler(hysteresis=2)
    for i in range(8):
        if i == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(weight.sum() * (INF if i == 4 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert weight.isfinite().all()
    assert scaler.get_scale() == 2.0**16


def test_warnings_of_torch_stay_warnings():
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            found = grad_scaler._check_inf_per_device(self)
            if not any(flag.item() for flag in found.values()):
                super().step()

    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = Old([weight], lr=0.0), GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(optimizer)
    assert scaler.last_step_applied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.update()
