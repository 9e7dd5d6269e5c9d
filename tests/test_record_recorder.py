"""What the recorders keep of a step, against plain twins: every operation's values, and every module's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from reference.modules import plain_modules
from reference.nets import CPU
from reference.values import plain_values
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from halfstep.formats import FORMATS
from halfstep.record import ModuleRecorder, OperationRecorder, Record, Values
from halfstep.record.recorder import floats, inputs_of, is_uninitialised, op_name, written_to
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-1, 1, 24).reshape(6, 4)
COUNTS = tuple(plain_values(torch.zeros(1)))


def record(run, model=None):
    with OperationRecorder(model or nn.Module()) as recorder:
        run()
    return recorder.read().operations


def says(values):
    return {name: getattr(values, name) for name in COUNTS}


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    count = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    return count + sum(len(p._backward_hooks or ()) for p in model.parameters())


def nothing_is_left(model, num_hooks=0):
    assert hooks_of(model) == num_hooks
    assert _get_current_dispatch_mode() is None
    assert torch._C._len_torch_function_stack() == 0


class Net(nn.Module):
    """Linear, norm, tied weights, an in-place activation, and values that 16 bit rounds to zero."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.act = nn.ReLU(inplace=True)
        self.again = nn.Linear(4, 8)
        self.again.weight = self.up.weight

    def forward(self, x):
        x = self.down(self.act(self.norm(self.up(x))))
        return (x * 1e-7) @ self.again.weight.t()


def loss_of(out):
    return F.cross_entropy(out.float(), torch.tensor([0, 1, 2, 3, 0, 1]))


# --- operations ----------------------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """The plain twin: a copy of everything that goes in and comes out, at that moment."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t.detach().clone() for t in floats(inputs_of(func, args, kwargs))]
        result = func(*args, **kwargs)
        self.calls.append((op_name(func), inputs, [t.detach().clone() for t in floats(result)]))
        return result


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_values_of_every_operation_are_those_of_copies(policy):
    model = Net()
    region = Region(model, policy, CPU)

    def run():
        with region:
            loss = loss_of(model(X))
        with region.backward():
            loss.backward(torch.tensor(2.0**10))
        model.zero_grad()

    copies = Copies()
    with copies:
        run()
    operations = record(run, model)
    expected = {}
    for name, inputs, outputs in copies.calls:
        expected.setdefault(name, []).append((inputs, outputs))
    assert len(operations) > 20
    for operation in operations:
        inputs, outputs = expected[operation.op].pop(0)
        for values, tensors in ((operation.inputs, inputs), (operation.outputs, outputs)):
            assert [v.shape for v in values] == [tuple(t.shape) for t in tensors]
            for value, tensor in zip(values, tensors, strict=True):
                assert says(value) == plain_values(tensor)
                assert FORMATS[value.format].dtype == tensor.dtype


def test_an_operation_has_its_place_and_its_formats():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Region(model, "bf16", CPU):
        operations = record(lambda: model(X), model)
    product = next(o for o in operations if o.op == "addmm")
    assert (product.site.module, product.site.phase, product.site.file) == ("0", "forward", __file__)
    assert [v.format for v in (*product.inputs, *product.outputs)] == ["bf16"] * 4
    cast = next(o for o in operations if o.is_cast)
    assert [v.format for v in (*cast.inputs, *cast.outputs)] == ["fp32", "bf16"]


def test_an_output_is_the_same_object_as_the_input_of_who_uses_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    operations = record(lambda: model(X).sum().backward(), model)
    by_op = {operation.op: operation for operation in operations}
    assert by_op["tanh"].inputs[0] is by_op["addmm"].outputs[0]
    # What autograd saved for backward is found again, and a parameter has its name.
    assert by_op["tanh_backward"].inputs[1] is by_op["tanh"].outputs[0]
    assert [values.name for values in by_op["addmm"].inputs] == ["0.bias", None, "0.weight"]
    # Through a transpose the object is another one, and its counts are the same.
    gradient = by_op["tanh_backward"].outputs[0]
    assert any(v.row is gradient.row and v is not gradient for v in by_op["mm"].inputs)


def test_values_before_and_after_a_write_are_told_apart():
    x = torch.tensor([1.0, -2.0, 3.0])

    def run():
        x.mul_(2)
        x[1:].add_(10)
        x.relu_()
        x.data.mul_(3)  # no version of x counts this one
        x.exp()

    operations = record(run)
    read = [operation.inputs[0].largest for operation in operations]
    written = [operation.outputs[0].largest for operation in operations[:-1]]
    assert [o.op for o in operations] == ["mul_", "add_", "relu_", "mul_", "exp"]
    assert read == [3.0, 6.0, 16.0, 16.0, 48.0]
    assert written == [6.0, 16.0, 16.0, 48.0]
    assert operations[2].inputs[0].num_zeros == 0


def test_what_an_operation_wrote_is_what_the_next_one_reads():
    x = torch.tensor([1.0, -2.0, 3.0])
    scaled, cut, read = record(lambda: x.mul_(2).relu_().exp())
    assert scaled.inputs[0] is not scaled.outputs[0]
    assert cut.inputs[0] is scaled.outputs[0]
    assert read.inputs[0] is cut.outputs[0]


def test_a_saved_tensor_that_a_view_of_it_changed_is_not_taken_for_the_old_one():
    x = torch.ones(4)

    def run():
        x.exp()
        x.view(2, 2)[0].fill_(7.0)
        x.exp()

    first, _, second = record(run)
    assert (first.inputs[0].largest, second.inputs[0].largest) == (1.0, 7.0)


def test_what_is_overwritten_is_not_read():
    x, out = torch.ones(3), torch.full((3,), math.nan)

    def run():
        torch.add(x, 1.0, out=out)
        out.copy_(x)
        out.fill_(2.0)
        out.zero_()

    operations = record(run)
    assert [[v.largest for v in o.inputs] for o in operations] == [[1.0], [1.0], [], []]
    assert [[v.largest for v in o.outputs] for o in operations] == [[2.0], [1.0], [2.0], [0.0]]
    assert not any(v.kind for o in operations for v in (*o.inputs, *o.outputs))


def test_memory_that_nobody_wrote_is_not_measured():
    def run():
        for _ in range(20):
            torch.full((64,), math.nan)  # what the next one may find
            x = torch.empty(64)
            torch.zeros_like(x)
            torch.empty_like(x).new_empty(64).resize_(32)
            x.new_ones(64)
            x.new_full((3,), 2.0)
            torch.rand_like(x)
            x.bernoulli_(0.5)
            del x

    operations = [o for o in record(run) if o.op != "full"]
    assert {o.op for o in operations} >= {"zeros_like", "new_ones", "new_full", "rand_like", "bernoulli_"}
    assert not any(o.inputs for o in operations)
    assert not any(v.kind for o in operations for v in o.outputs)


def test_names_of_uninitialised_memory():
    assert all(is_uninitialised(n) for n in ("empty", "empty_like", "new_empty_strided", "_empty_affine", "resize_"))
    assert not any(is_uninitialised(n) for n in ("emptied", "new_zeros") if n != "emptied")


def test_what_an_operation_writes():
    aten = torch.ops.aten
    x, y = torch.ones(2), torch.ones(2)
    assert written_to(aten.add.Tensor, (x, y), {}) == []
    assert written_to(aten.add_.Tensor, (x, y), {})[0] is x
    assert written_to(aten.add.out, (x, x), {"out": y})[0] is y
    assert [id(t) for t in written_to(aten._foreach_add_.Scalar, ([x, y], 1.0), {})] == [id(x), id(y)]


def test_numbers_that_are_not_floating_are_left_out():
    operations = record(lambda: (torch.arange(3) + 1, F.one_hot(torch.tensor([0, 1]))))
    assert operations == ()
    table = torch.ones(2, 3)
    (embedding,) = record(lambda: F.embedding(torch.tensor([0, 1]), table))
    assert [v.shape for v in embedding.inputs] == [(2, 3)]


def test_a_fill_with_minus_infinity_is_told():
    mask = X > 0
    filled, softmax = record(lambda: X.masked_fill(mask, -math.inf).softmax(-1))
    assert (filled.fills_inf, softmax.fills_inf) == (True, False)
    assert filled.outputs[0].num_negative_inf == filled.outputs[0].num_inf == int(mask.sum())


def test_what_returns_nothing_is_not_recorded_but_what_it_wrote_is_seen():
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 0.5)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)

    def run():
        weight.detach().exp()
        optimizer.step()
        torch._foreach_mul_([weight.grad], 4.0)
        weight.detach().exp()
        weight.grad.exp()

    operations = record(run)
    assert not {o.op for o in operations} & {"_fused_adamw_", "_foreach_mul_"}
    before, after, gradient = (o.inputs[0].largest for o in operations if o.op == "exp")
    assert (before, gradient) == (1.0, 2.0)
    assert 0.8 < after < 1.0


def test_running_statistics_are_among_what_is_written():
    norm = nn.BatchNorm1d(4)
    first, second = [o for o in record(lambda: norm(norm(X * 8)), norm) if "batch_norm" in o.op]
    assert [v.name for v in first.outputs if v.name] == ["running_mean", "running_var"]
    assert first.inputs[-1].largest == 1.0
    assert second.inputs[-1] is first.outputs[-1]
    assert second.inputs[-1].largest > 1.0
    assert second.outputs[-1].largest == norm.running_var.max()


def test_a_result_that_is_complex_or_empty():
    (fft,) = [o for o in record(lambda: torch.fft.fft(X, dim=-1)) if o.op == "_fft_r2c"]
    assert (fft.outputs[0].format, fft.outputs[0].size) == ("complex64", 48)
    (empty,) = record(lambda: X[:0].exp())
    assert (empty.outputs[0].size, empty.outputs[0].largest) == (0, 0.0)


# --- zeros made by a cast ------------------------------------------------------------------------------------------


SMALL = torch.tensor([0.0, -0.0, 1e-3, 1e-8, -1e-8, 2.0**-25, 2.0**-25 * 1.01, 3e-24, 1e-41, math.nan, math.inf])


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, 5), (torch.bfloat16, 1)])
def test_zeros_made_by_a_cast_are_counted(dtype, expected):
    # Half the smallest subnormal of fp16, 2^-25, rounds to even, which is zero; the smallest of bf16 is 2^-133.
    small = torch.cat([SMALL, torch.tensor([2.0**-135])])
    twin = int(((small != 0) & (small.to(dtype) == 0)).sum())
    (cast,) = record(lambda: small.to(dtype))
    assert cast.zeroed_by_cast == twin
    target = torch.zeros(len(small), dtype=dtype)
    (copy,) = record(lambda: target.copy_(small))
    assert copy.zeroed_by_cast == twin
    assert twin >= expected


def test_zeros_made_by_the_cast_of_a_gradient_are_counted():
    x = torch.ones(4, requires_grad=True)
    scale = torch.tensor([1.0, 1e-9, 1e-12, 0.0])
    operations = record(lambda: (x.half().float() * scale).sum().backward())
    casts = [o for o in operations if o.is_cast and o.outputs[0].format == "fp16"]
    assert [(o.site.phase, o.zeroed_by_cast) for o in casts] == [("forward", 0), ("backward", 2)]


def test_what_is_no_cast_makes_none():
    one, many = torch.tensor(1e-9), torch.ones(5, dtype=torch.float16)
    operations = record(lambda: (many.copy_(one), torch.ones(2).copy_(torch.zeros(2)), torch.ones(3).mul(0)))
    assert [o.zeroed_by_cast for o in operations if o.op in ("mul", "ones")] == [0] * 3
    spread, same = (o for o in operations if o.op == "copy_")
    assert spread.zeroed_by_cast == 0  # five values of one: not to be counted by a difference
    assert same.zeroed_by_cast == 0
    assert not same.is_cast


# --- modules -------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Gives structures, and calls a part twice."""

    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        first = self.act(self.lin(x))
        return {"out": [first, (self.act(first) * 2, torch.arange(3))], "name": "abc"}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.net, self.nested, self.same = nn.Sequential(nn.Linear(4, 4), nn.Identity()), Nested(), nn.Identity()

    def forward(self, x):
        out = self.nested(self.net(x))["out"]
        return self.same(out[0] + out[1][0])


def two_micro_batches(region):
    for number in range(2):
        with region:
            loss = region.model(X * (number + 1)).float().square().sum()
        with region.backward():
            loss.backward(torch.tensor(2.0**12))


def normed():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))


@pytest.mark.parametrize("make", [Net, Outer, normed])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_modules_are_those_of_plain_hooks(make, policy):
    twin, region = Region(make(), policy, CPU), Region(make(), policy, CPU)
    expected = plain_modules(twin.model, lambda: two_micro_batches(twin))
    num_hooks = hooks_of(region.model)
    with ModuleRecorder(region.model) as recorder:
        two_micro_batches(region)
    nothing_is_left(region.model, num_hooks)
    found = recorder.read().modules
    assert [(m.module, m.kind, m.name) for m in found] == [key[:3] for key in expected]
    for value, (*_, tensor) in zip(found, expected, strict=True):
        assert value.values.shape == tuple(tensor.shape)
        assert FORMATS[value.values.format].dtype == tensor.dtype
        assert says(value.values) == plain_values(tensor)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_shows_each_activation_once_and_all_gradients(reentrant):
    class Checked(nn.Module):
        def __init__(self, checks):
            super().__init__()
            torch.default_generator.manual_seed(0)
            self.stem, self.block, self.checks = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), checks

        def forward(self, x):
            x = self.stem(x)
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.checks else self.block(x)

    def modules(model):
        with ModuleRecorder(model) as recorder:
            model(X).sum().backward()
        return sorted((m.module, m.kind, m.name or "", m.values.row) for m in recorder.read().modules)

    assert modules(Checked(True)) == modules(Checked(False))


def test_a_tensor_that_several_modules_give_is_counted_once():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Identity()))
    with ModuleRecorder(model) as recorder:
        model(X).sum().backward()
    found = recorder.read().modules
    assert [m.module for m in found if m.kind == "activation"] == ["0.0", "0.1", "0", ""]
    assert len({id(m.values.row) for m in found if m.kind != "weight gradient"}) == 2


def test_an_activation_that_a_later_layer_overwrites_is_kept_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with ModuleRecorder(model) as recorder, torch.no_grad():
        before = nn.functional.linear(X, model[0].weight, model[0].bias)
        model(X)
    linear, relu, _ = recorder.read().modules
    assert says(linear.values) == plain_values(before)
    assert says(relu.values) == plain_values(before.relu())


def test_frozen_parameters_and_modules_without_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with ModuleRecorder(model) as recorder:
        model(X).sum().backward()
    kinds = [(m.module, m.kind) for m in recorder.read().modules]
    assert kinds.count(("0", "gradient")) == kinds.count(("0", "weight gradient")) == 0
    assert kinds.count(("1", "weight gradient")) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_has_activations(mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with ModuleRecorder(model) as recorder, mode():
        model(X)
    assert [m.values.num_zeros > 0 for m in recorder.read().modules] == [False, True, True]


# --- manners -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OperationRecorder, ModuleRecorder])
def test_a_recorded_step_gives_the_same_bits_and_leaves_nothing_behind(kind):
    def train(recorded):
        torch.default_generator.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), "fp16", hardware=CPU)
        num_hooks = hooks_of(model)
        for step in range(3):
            if recorded and step == 1:
                with kind(model) as recorder:
                    stepper.step(lambda: loss_of(model(X)))
                assert recorder.read() != Record()
                nothing_is_left(model, num_hooks)
            else:
                stepper.step(lambda: loss_of(model(X)))
        return model.state_dict()

    plain, recorded = train(False), train(True)
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)


@pytest.mark.parametrize("kind", [OperationRecorder, ModuleRecorder])
def test_nothing_is_left_after_an_exception(kind):
    model, recorder = Net(), None

    def fail():
        nonlocal recorder
        with kind(model) as recorder:
            model(X)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    nothing_is_left(model)
    assert recorder.read() != Record()


@pytest.mark.parametrize("width", [4, 2048])
def test_two_recorders_at_once_do_not_see_each_other(width):
    """Small tensors are copied, large ones counted at once, by operations of torch in both cases."""
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh()).bfloat16()

    def run():
        model(X.bfloat16()).sum().backward()

    alone = record(run, model)
    model.zero_grad()
    with OperationRecorder(model) as outer, ModuleRecorder(model) as modules, OperationRecorder(model) as inner:
        run()
    for recorder in (outer, inner):
        assert [o.op for o in recorder.read().operations] == [o.op for o in alone]
    assert len(modules.read().modules) == 8
    nothing_is_left(model)


@pytest.mark.parametrize("kind", [OperationRecorder, ModuleRecorder])
def test_a_recorder_keeps_no_tensor_of_the_step_alive(kind):
    """Large tensors are counted at once; of small ones it has copies."""
    import weakref

    model, alive = nn.Linear(4, 4), []
    with kind(model):
        for size in (6, 5000):
            out = model(torch.ones(size, 4))
            alive.append(weakref.ref(out.untyped_storage()))
            out.sum().backward()
            del out
        assert [reference() for reference in alive] == [None, None]


def test_nothing_recorded_is_an_empty_record():
    for kind in (OperationRecorder, ModuleRecorder):
        with kind(nn.Linear(1, 1)) as recorder:
            pass
        assert recorder.read() == Record()


def test_a_recorder_of_a_gradient_of_a_gradient():
    model = nn.Sequential(nn.Linear(4, 1), nn.Tanh())

    def run():
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    operations = record(run, model)
    assert {o.site.module for o in operations if o.op == "tanh_backward"} == {"1"}
    with ModuleRecorder(model) as recorder:
        run()
    assert all(m.values.kind is None for m in recorder.read().modules)


def test_values_compare_by_identity():
    row = (0,) * 261
    assert Values("fp32", (), None, row) != Values("fp32", (), None, row)
