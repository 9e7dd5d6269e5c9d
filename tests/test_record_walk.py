"""Where an operation runs: module, function, phase and the line in the user's code, which are those of this file."""

from __future__ import annotations

import math
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference.nets import CPU
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from halfstep.record import Site, Walk
from halfstep.record.recorder import op_name
from halfstep.record.walk import is_users
from halfstep.region import Region

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-1, 1, 24).reshape(6, 4)
LINES = Path(__file__).read_text().splitlines()


def line(mark):
    """Number of the line of this file that ends with ``# <- mark``."""
    return next(number for number, text in enumerate(LINES, 1) if text.endswith(f"# <- {mark}"))


class Seen:
    """A visitor that notes every operation."""

    def __init__(self, sees_views=False):
        self.sees_views, self.operations = sees_views, []

    def visit(self, site, func, args, kwargs):
        self.operations.append((op_name(func), site))
        return func(*args, **kwargs)

    def sites(self, op, phase=None):
        return [site for name, site in self.operations if name == op and phase in (None, site.phase)]

    def site(self, op, phase=None):
        sites = set(self.sites(op, phase))
        assert len(sites) == 1, (op, sites, [name for name, _ in self.operations])
        return sites.pop()


def walk(model, run, sees_views=False):
    seen = Seen(sees_views)
    with Walk(model, seen):
        run()
    return seen


def here(module, function, phase, mark):
    return Site(module, function, phase, __file__, line(mark))


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


# --- forward -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A container with code of its own between its parts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.up(x)  # <- up
        hidden = hidden.softmax(-1)  # <- softmax
        return x + self.down(hidden)  # <- down


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.block = Block()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        x = self.stem(x)  # <- stem
        x = self.block(x)
        return x @ self.weight  # <- matmul


def loss_of(out):
    return F.cross_entropy(out, torch.tensor([0, 1, 2, 3, 0, 1]))  # <- loss


def test_module_function_and_line_of_every_forward_operation():
    model = Net()
    seen = walk(model, lambda: loss_of(model(X)))
    assert [(name, site) for name, site in seen.operations if name != "lift_fresh"] == [
        ("addmm", here("stem.0", "linear", "forward", "stem")),
        ("tanh", here("stem.1", "tanh", "forward", "stem")),
        ("addmm", here("block.up", "linear", "forward", "up")),
        ("_softmax", here("block", "softmax", "forward", "softmax")),
        ("addmm", here("block.down", "linear", "forward", "down")),
        ("add", here("block", "add", "forward", "down")),
        ("mm", here("", "matmul", "forward", "matmul")),
        ("_log_softmax", here(None, "cross_entropy", "forward", "loss")),
        ("nll_loss_forward", here(None, "cross_entropy", "forward", "loss")),
    ]


def test_backward_operations_have_the_place_of_their_forward_ones():
    model = Net()
    seen = walk(model, lambda: loss_of(model(X)).backward())
    assert seen.site("nll_loss_backward") == here(None, "cross_entropy", "backward", "loss")
    assert seen.site("_log_softmax_backward_data") == here(None, "cross_entropy", "backward", "loss")
    assert seen.site("_softmax_backward_data") == here("block", "softmax", "backward", "softmax")
    assert seen.site("tanh_backward") == here("stem.1", "tanh", "backward", "stem")
    products = list(dict.fromkeys(seen.sites("mm", "backward")))
    assert products == [
        here("", "matmul", "backward", "matmul"),
        here("block.down", "linear", "backward", "down"),
        here("block.up", "linear", "backward", "up"),
        here("stem.0", "linear", "backward", "stem"),
    ]
    phases = [site.phase for _, site in seen.operations]
    assert phases == sorted(phases, reverse=True), "in order of execution"


def test_what_autocast_and_an_fp32_rule_insert_lies_on_the_users_line():
    model = Net()
    with Region(model, "bf16 module:block=fp32", CPU) as region:
        seen = Seen()
        with Walk(model, seen):
            loss = loss_of(model(X).float())
            with region.backward():
                loss.backward()
    casts = seen.sites("_to_copy")
    assert {site.file for site in casts if site.file} == {__file__}
    block = [site for site in casts if site.module == "block" and site.phase == "forward"]
    assert block, "the wrapper of the rule casts what comes in"
    assert {site.line for site in block} == {line("stem") + 1}
    assert here("stem.0", "linear", "backward", "stem") in casts


def test_views_are_seen_only_by_who_asks():
    model = nn.Linear(4, 4)
    assert "t" not in dict(walk(model, lambda: model(X)).operations)
    assert dict(walk(model, lambda: model(X), sees_views=True).operations)["t"].module == ""


def test_shared_modules_and_several_calls():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    seen = walk(model, lambda: model(model(X)))
    assert [site.module for site in seen.sites("addmm")] == ["0"] * 4


def test_parts_called_without_their_model():
    model = Net()
    seen = walk(model, lambda: model.block.up(model.stem(X)).exp())
    assert [site.module for name, site in seen.operations] == ["stem.0", "stem.1", "block.up", None]


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Refuses())

    def forward(self, x):
        try:
            return self.inner(x)
        except ArithmeticError:
            return x.exp()


class Refuses(nn.Module):
    def forward(self, x):
        raise ArithmeticError


def test_an_exception_that_the_model_catches_leaves_its_modules():
    model = nn.Sequential(Raises(), nn.Tanh())
    seen = walk(model, lambda: model(X).sin())
    assert [(name, site.module) for name, site in seen.operations] == [
        ("addmm", "0.inner.0"),
        ("exp", "0"),
        ("tanh", "1"),
        ("sin", None),
    ]


def test_an_exception_that_leaves_the_walk_leaves_nothing_behind():
    model = nn.Sequential(Refuses())
    with pytest.raises(ArithmeticError):
        walk(model, lambda: model(X))
    assert hooks_of(model) == 0
    assert _get_current_dispatch_mode() is None
    assert torch._C._len_torch_function_stack() == 0


def test_a_walk_inside_a_module_that_is_running():
    class Looks(nn.Module):
        def forward(self, x):
            self.seen = Seen()
            self.walk = Walk(self, self.seen)
            with self.walk:
                x = x.exp()
            self.walk.__enter__()
            return x

    model = Looks()
    try:
        model(X)  # its end is seen by a hook that did not see its beginning
        X.sin()
    finally:
        model.walk.__exit__(None, None, None)
    assert [site.module for _, site in model.seen.operations] == [None, None]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_same_operations_are_seen(mode):
    model, x = Net().half(), X.half()

    def run():
        with mode():
            loss_of(model(x).float())

    names = [name for name, _ in walk(model, run).operations if name not in ("lift_fresh", "detach_")]
    expected = ["addmm", "tanh", "addmm", "_softmax", "addmm", "add", "mm"]
    assert names == [*expected, "_to_copy", "_log_softmax", "nll_loss_forward"]


def test_names_of_operators_methods_and_in_place_forms():
    model, x = nn.Identity(), X.clone()

    def run():
        2 - x
        x.mul_(2)
        torch.exp(x)
        x[0] = 1.0
        F.gelu(x)
        F.scaled_dot_product_attention(x[None], x[None], x[None])

    names = [site.function for _, site in walk(model, run).operations]
    assert names[:5] == ["rsub", "mul", "exp", "setitem", "gelu"]
    assert set(names[5:]) == {"scaled_dot_product_attention"}


def test_code_of_the_user_is_what_is_neither_torch_nor_halfstep_nor_pythons_own(tmp_path):
    torch_folder, own = Path(torch.__file__).parent, Path(sys.modules["halfstep"].__file__).parent
    assert not is_users(str(torch_folder / "nn" / "functional.py"))
    assert not is_users(str(own / "region.py"))
    assert not is_users(textwrap.__file__)
    assert not is_users("<eval_with_key>.3")
    assert is_users(str(own / "workloads" / "mlp.py"))
    assert is_users(f"{torch_folder}vision/ops.py")
    assert is_users(f"{own}_of_mine/net.py")
    assert is_users(pytest.__file__)
    assert is_users(str(tmp_path / "net.py"))
    assert is_users("<stdin>")


# --- backward ------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone().mul(2)  # <- custom forward

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul(2).exp()  # <- custom backward


class Custom(nn.Module):
    def forward(self, x):
        return Doubled.apply(x.sin())  # <- apply


def test_a_custom_function_has_its_own_lines():
    model = nn.Sequential(nn.Linear(4, 4), Custom())
    seen = walk(model, lambda: model(X).sum().backward())
    assert seen.site("clone", "forward") == here("1", "clone", "forward", "custom forward")
    assert seen.site("exp") == here("1", "exp", "backward", "custom backward")
    assert seen.sites("mul", "backward")[0] == here("1", "mul", "backward", "custom backward")
    assert seen.site("cos") == here("1", "sin", "backward", "apply")


def test_a_hook_of_the_user_has_its_own_line():
    def run():
        out = model(X)
        out.register_hook(lambda gradient: gradient.sinh())  # <- hook
        out.sum().backward()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    site = walk(model, run).site("sinh")
    assert (site.module, site.phase, site.line) == ("1", "backward", line("hook"))


def test_the_sum_of_two_micro_batches_is_the_parameters_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def run():
        for _ in range(2):
            model(X).sum().backward()

    added = [site for site in walk(model, run).sites("add_", "backward") if site.file is None]
    assert added
    assert {(site.module, site.function) for site in added} == {("0", None)}


def test_of_a_parameter_in_two_modules_the_first_owns_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    opened = Walk(model, Seen())
    with opened:
        pass
    assert opened._owners[id(model[0].weight)] == "0"


def test_a_write_into_a_view_has_the_place_of_that_write():
    def run():
        out = torch.zeros(6, 4)
        out[:, 1:] = model(X)[:, 1:]  # <- write
        out.sum().backward()

    model = nn.Linear(4, 4)
    seen = walk(model, run)
    places = {(site.module, site.line) for name, site in seen.operations if site.phase == "backward"}
    assert (None, line("write")) in places
    assert all(number is not None for module, number in places if module is None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_forward(reentrant):
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Checked())
    seen = walk(model, lambda: model(X).sum().backward())
    assert seen.sites("_softmax") == [here("1.block", "softmax", "forward", "softmax")] * 2
    assert seen.site("_softmax_backward_data") == here("1.block", "softmax", "backward", "softmax")
    assert here("1.block.up", "linear", "backward", "up") in seen.sites("mm")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_without_modules_is_forward_too(reentrant):
    def inner(x):
        return x.sin().exp()  # <- inner

    model = nn.Linear(4, 4)
    seen = walk(model, lambda: checkpoint(inner, model(X), use_reentrant=reentrant).sum().backward())
    assert seen.sites("sin")[0] == here(None, "sin", "forward", "inner")
    assert len(seen.sites("sin", "forward")) == 2
    assert {site.phase for site in seen.sites("exp")} == {"forward"}
    assert seen.site("cos") == here(None, "sin", "backward", "inner")


class Penalised(nn.Module):
    """Takes a gradient inside of its forward pass, and a gradient of that follows."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 1)

    def forward(self, x):
        x = x.clone().requires_grad_()
        out = self.lin(x).sin()  # <- sine
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.sum() + slope.square().sum()  # <- penalty


def test_a_gradient_inside_of_forward_is_backward_and_so_is_a_gradient_of_it():
    model = nn.Sequential(nn.Identity(), Penalised())
    seen = walk(model, lambda: model(X).backward())
    assert seen.sites("cos")[0] == here("1", "sin", "backward", "sine")
    assert seen.site("pow", "forward") == here("1", "square", "forward", "penalty")
    # cos came from the first backward pass; its own derivative, and that of what it was multiplied with, come last.
    second = seen.sites("neg", "backward")
    assert second == [here("1", "sin", "backward", "sine")]
    assert all(site.module in ("", "1", "1.lin") for _, site in seen.operations if site.phase == "backward")


def test_a_checkpoint_whose_function_takes_a_gradient():
    model = nn.Sequential(nn.Linear(4, 4), Penalised())

    def run():
        checkpoint(model, X, use_reentrant=False).backward()  # <- checkpoint

    seen = walk(model, run)
    # The model is called by torch there, so that the line of the first time is the only one.
    assert {(s.function, s.line) for s in seen.sites("addmm") if s.module == "0"} == {("linear", line("checkpoint"))}
    assert len(seen.sites("sin", "forward")) == 2
    assert seen.site("cos") == here("1", "sin", "backward", "sine")


# --- manners -------------------------------------------------------------------------------------------------------


def test_a_walk_leaves_nothing_behind_and_can_be_opened_again():
    model = Net()
    expected = model(X)
    seen = Seen()
    opened = Walk(model, seen)
    for _ in range(2):
        with opened:
            found = model(X)
        assert torch.equal(found, expected)
    assert len(seen.operations) == 2 * 7
    assert hooks_of(model) == 0
    assert _get_current_dispatch_mode() is None
    assert torch._C._len_torch_function_stack() == 0
    model(X)
    assert len(seen.operations) == 2 * 7


def test_values_and_gradients_are_the_same_to_the_bit():
    model = Net()
    loss_of(model(X)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    walk(model, lambda: loss_of(model(X)).backward())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_hooks_and_modes_of_the_user_stay():
    class Counts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    model, calls = Net(), []
    model.block.register_forward_hook(lambda *_: calls.append("block"))
    with Counts() as counts:
        seen = walk(model, lambda: model(X), sees_views=True)
        assert _get_current_dispatch_mode() is counts
    assert counts.count == len(seen.operations)
    assert calls == ["block"]
    assert hooks_of(model) == 1


def test_what_the_visitor_runs_itself_is_not_seen():
    class Asks(Seen):
        def visit(self, site, func, args, kwargs):
            result = super().visit(site, func, args, kwargs)
            torch.ones(3).exp().sum()
            return result

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model, seen, names = nn.Tanh(), Asks(), []
    x = X.clone().requires_grad_()
    with Names(), Walk(model, seen):
        torch.autograd.backward([model(x)], [X])  # which is no torch function, so that modes stay on meanwhile
    assert [name for name, _ in seen.operations] == ["tanh", "tanh_backward", "detach"][: len(seen.operations)]
    assert names[0] == "tanh"
    assert "exp" not in names


def test_a_default_device_and_a_function_mode_of_the_user_do_not_matter():
    model, seen = Net(), Seen()
    with torch.device("cpu"), Walk(model, seen):
        model(X)
    assert seen.sites("tanh") == [here("stem.1", "tanh", "forward", "stem")]


def test_a_compiled_model_runs_uncompiled_meanwhile():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fast = torch.compile(model, backend=backend)
    expected = fast(X)
    seen = walk(model, lambda: fast(X))
    assert [(name, site.module) for name, site in seen.operations] == [("addmm", "0"), ("tanh", "1")]
    with torch.compiler.set_stance("fail_on_recompile"):  # the compiled code is still there, and used again
        assert torch.equal(fast(X), expected)
    assert (len(compiled), len(seen.operations)) == (1, 2)
    torch._dynamo.reset()


def test_a_number_that_fills_is_no_function_of_the_visitor():
    """A mask of -inf, as attention has it, is seen with the line that made it."""

    def run():
        X.masked_fill(X > 0, -math.inf).softmax(-1)  # <- mask

    seen = walk(nn.Identity(), run)
    assert seen.site("masked_fill") == here(None, "masked_fill", "forward", "mask")
