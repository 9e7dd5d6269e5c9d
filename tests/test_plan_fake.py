"""A device that is not here: modules without memory, batches of their own, and code that asks for CUDA."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from halfstep.errors import HalfstepError
from halfstep.plan.fake import FakeDevice
from halfstep.plan.target import target_of


@pytest.fixture
def device():
    return FakeDevice(target_of("RTX 3070"))


def built(device, make):
    with device.building():
        return make()


def fake(*tensors):
    return all(isinstance(tensor, FakeTensor) for tensor in tensors)


def nbytes(tensor):
    return tensor.untyped_storage().nbytes()


# --- building ------------------------------------------------------------------------------------------------------


def test_modules_hold_fake_tensors_and_everything_else_is_real(device):
    real = nn.Linear(2, 2)

    def make():
        assert not fake(torch.ones(3), torch.linspace(0, 1, 3))
        assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0, 0.5, 1]
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), real)

    model = built(device, make)
    assert fake(*model[:2].parameters(), *model[:2].buffers())
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert not fake(*real.parameters())
    assert not fake(*nn.Linear(2, 2).parameters())


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.to("cuda").half()])
def test_a_module_converts_its_parameters_in_place(device, convert):
    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        before = list(model.parameters())
        assert convert(model) is model
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        return model

    model = built(device, make)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert nbytes(model[0].weight) == 2 * 12
    assert model[0].weight.requires_grad
    assert nn.Linear(2, 2).half().weight.dtype == torch.float16


@pytest.mark.parametrize(
    "make",
    [
        lambda: AveragedModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))(torch.ones(2, 3)),
        lambda: parametrizations.weight_norm(nn.Linear(3, 3))(torch.ones(2, 3)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3))(torch.ones(2, 3)),
        lambda: nn.LSTM(3, 4)(torch.ones(5, 2, 3))[0],
        lambda: nn.GRU(3, 4)(torch.ones(5, 2, 3))[0],
        lambda: nn.MultiheadAttention(4, 2)(*[torch.ones(5, 2, 4)] * 3)[0],
        lambda: nn.DataParallel(nn.Linear(3, 3))(torch.ones(2, 3)),
        lambda: nn.EmbeddingBag(9, 3)(torch.zeros(2, 4, dtype=torch.long)),
    ],
    ids=["ema", "weight_norm", "spectral_norm", "lstm", "gru", "attention", "parallel", "bag"],
)
def test_modules_of_torch_run_forward_and_backward(device, make):
    with device.building(), device.running():
        output = make()
        output.sum().backward()
    assert fake(output)


def test_a_deep_copy_is_another_fake_tensor_of_the_same_mode(device):
    module = built(device, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    module[1].weight = module[0].weight
    module[0].weight.grad = torch.zeros_like(module[0].weight)
    with device.building():
        for _ in range(3):
            other = copy.deepcopy(module)
    assert fake(*other.parameters())
    assert other[0].weight.fake_mode is device.mode
    assert other[1].weight is other[0].weight
    assert isinstance(other[0].weight, nn.Parameter)
    assert other[0].weight.grad is not None
    assert nbytes(other[0].bias) == 16
    with device.building(), pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(module[0].weight * 2)


# --- batches -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str


def test_a_batch_has_memory_of_its_own_whatever_it_is_a_view_of(device):
    data = torch.zeros(1000, 8)
    batch = device.batch({"rows": data[3:5], "part": Batch(data[:4, ::2], "n"), "wide": torch.zeros(1, 4).expand(6, 4)})
    assert fake(batch["rows"], batch["part"].x, batch["wide"])
    assert [nbytes(t) for t in (batch["rows"], batch["part"].x, batch["wide"])] == [64, 64, 96]
    assert batch["part"].name == "n"
    assert device.batch(torch.zeros(2, requires_grad=True)).requires_grad
    images = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert device.batch(images).stride() == images.stride()


# --- CUDA ----------------------------------------------------------------------------------------------------------


def moves(x):
    index = torch.device("cuda", 0)
    made = [torch.zeros(2, device="cuda"), torch.ones(2, device=index), x.new_zeros(2, device="cuda:0")]
    moved = [x.cuda(), x.cuda(0, non_blocking=True), x.to("cuda"), x.to(index), x.to(0), x.to(device="cuda")]
    return [*made, *moved, x.to("cuda", torch.float16, non_blocking=True)]


def test_what_moves_to_cuda_is_there_already(device):
    with device.running():
        x = torch.zeros(2)
        moved = moves(x)
        assert {each.device.type for each in moved} == {"cpu"}
        assert moved[3] is x
        assert moved[-1].dtype == torch.float16
    assert device.notes() == []


def test_what_a_checkpoint_runs_again_moves_as_well(device):
    with device.running():
        x = torch.zeros(2, requires_grad=True)
        checkpoint(lambda x: x.cuda() * torch.ones(2, device="cuda"), x, use_reentrant=False).sum().backward()
        assert x.grad.shape == (2,)


def test_torch_cuda_answers_for_the_target(device):
    with device.building():
        assert torch.cuda.get_device_capability() == (8, 6)
        assert torch.cuda.get_device_name(0) == "RTX 3070"
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.get_device_properties(0).total_memory == 8 * 2**30
        torch.cuda.synchronize()
        torch.cuda.set_device(0)
        with torch.cuda.nvtx.range("forward"):
            pass
    with FakeDevice(target_of("T4")).running():
        assert not torch.cuda.is_bf16_supported()


def test_what_is_not_known_of_a_target_is_not_answered():
    with FakeDevice(target_of("MI300X")).running(), pytest.raises(HalfstepError, match="no CUDA capability for MI300X"):
        torch.cuda.get_device_capability()
    with FakeDevice(target_of()).running():
        assert not hasattr(torch.cuda.get_device_properties(0), "total_memory")


class InFp32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return gradient * 2


def test_autocast_for_cuda_is_that_of_the_device(device):
    with device.running(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.zeros(2, 2)
        assert torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled()
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            assert (x @ x).dtype == torch.float16
        low = (x @ x).requires_grad_()
        out = InFp32.apply(low)
        assert out.dtype == torch.float32
        out.sum().backward()
        assert low.grad.dtype == torch.bfloat16


def test_what_leaves_the_device_and_what_asks_for_it_is_noted(device):
    with device.running():
        x = torch.zeros(4)
        x.cpu()
        x.to("cpu")
        x.sum().cpu()  # a number for a log
        assert not x.is_cuda
    offloads, questions = device.notes()
    assert offloads.count("test_plan_fake.py:") == 2
    assert offloads.endswith("are counted as still on the device.")
    assert questions.count("test_plan_fake.py:") == 1


def test_what_is_compiled_or_scripted_runs_as_it_is(device):
    def make():
        @torch.compile(mode="max-autotune")
        def double(x):
            return x * 2

        model = nn.Linear(3, 3)
        assert torch.compile(model) is model
        assert torch.jit.script(model) is model
        model.compile()
        assert double(torch.ones(2)).tolist() == [2, 2]
        return model

    model = built(device, make)
    with device.running():
        assert model(torch.zeros(2, 3)).shape == (2, 3)
    (note,) = device.notes()
    assert "is planned uncompiled" in note
    assert "and 1 more" in note


def test_on_a_cpu_nothing_stands_for_cuda():
    device = FakeDevice(target_of("cpu"))
    before = torch.cuda.synchronize
    with device.running():
        assert torch.cuda.synchronize is before
        with pytest.raises(RuntimeError, match="the plan is for a CPU"):
            torch.zeros(2, device="cuda")


def test_torch_is_as_it_was_once_the_device_is_closed(device):
    places = [(torch, "compile"), (torch.cuda, "synchronize"), (torch.utils, "swap_tensors"), (torch.jit, "script")]
    places += [(torch.autograd, "_engine_run_backward"), (nn.Module, "register_parameter"), (F, "one_hot")]
    before = [getattr(owner, name) for owner, name in places]
    with pytest.raises(ZeroDivisionError), device.building(), device.running():
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in places] == before
    assert not fake(torch.zeros(2))
    assert torch._C._len_torch_function_stack() == 0
