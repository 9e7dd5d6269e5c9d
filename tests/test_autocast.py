"""autocast: torch's arguments and behaviour, CUDA's lists on a CPU, and what stands by for the backward pass."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from reference.nets import AMX, BF16, CPU, FP16, FULL, Net, autocast_state, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import autocast_mode, cpu16, oplist
from halfstep import region as region_module
from halfstep.autocast_mode import autocast
from halfstep.errors import HalfstepError
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

both = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
X = torch.linspace(-2, 2, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def hardware(monkeypatch):
    """A CPU without 16-bit instructions, whatever the machine has; a test may put another in its place."""
    machine = {"is": CPU}
    monkeypatch.setattr(region_module, "detect", lambda device: machine["is"])
    yield machine
    autocast_mode._standing.close()


def linear(seed=0, width=8):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(8, width)


# --- torch's arguments and behaviour -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, BF16, FP16])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_it_is_torchs_own_with_the_same_arguments(dtype, enabled, cache_enabled):
    for args, kwargs in (
        (("cpu", dtype, enabled, cache_enabled), {}),
        ((), {"device_type": "cpu", "dtype": dtype, "enabled": enabled, "cache_enabled": cache_enabled}),
    ):
        ours, theirs = autocast(*args, **kwargs), torch.autocast(*args, **kwargs)
        assert isinstance(ours, torch.autocast)
        assert vars(ours) == vars(theirs)


def test_the_state_that_it_sets_and_puts_back():
    autocast("cpu", BF16)
    autocast("cpu", FP16)  # what stands by is there before and after
    before = autocast_state()
    with autocast("cpu", FP16, cache_enabled=False) as entered:
        assert entered is not None
        inside = autocast_state()
        assert inside[:4] == (True, FP16, False, 1)
        with autocast("cpu", enabled=False):
            assert autocast_state()[:4] == (False, FP16, False, 2)
            with autocast("cpu", BF16):
                assert autocast_state()[:4] == (True, BF16, False, 3)
        assert autocast_state() == inside
    assert autocast_state() == before


def test_an_exception_passes_through_and_leaves_nothing():
    with pytest.raises(ZeroDivisionError), autocast("cpu"):
        1 / 0  # noqa: B018
    assert not torch.is_autocast_enabled("cpu")


def test_one_object_opens_again_and_decorates():
    model, region = linear(), autocast("cpu", BF16)

    @region
    def forward(x):
        """What it says."""
        return model(x)

    assert forward.__doc__ == "What it says."
    for _ in range(2):
        assert forward(X).dtype == BF16
        with region:
            assert model(X).dtype == BF16
        assert model(X).dtype == FULL


@pytest.mark.parametrize(
    ("args", "error"), [((3,), ValueError), (("nothing",), RuntimeError), ((torch.device("cpu"),), ValueError)]
)
def test_a_device_that_torch_refuses(args, error):
    for function in (torch.autocast, autocast):
        with pytest.raises(error):
            function(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA, so nothing is switched off")
def test_without_cuda_its_region_is_off_as_in_torch():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        region = autocast("cuda", dtype=FP16)
    with region:
        assert linear()(X).dtype == FULL
    assert oplist.active is None


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_format_that_no_region_computes_in_is_refused(device_type, dtype):
    with pytest.raises(HalfstepError, match="autocast casts to a 16-bit format") as caught:
        autocast(device_type, dtype)
    assert caught.value.what == f"autocast({device_type!r}, dtype={dtype})"
    assert not autocast(device_type, dtype, enabled=False)._enabled  # nothing is asked of it


def test_fp32_on_a_cpu_says_that_it_is_off():
    with pytest.warns(UserWarning, match="dtype=torch.float32\\) is off") as caught:
        region = autocast("cpu", dtype=FULL)
    assert caught[0].filename == __file__
    with region:
        assert linear()(X).dtype == FULL
        assert linear()(X).softmax(-1).dtype == FULL
    autocast("cpu", dtype=FULL, enabled=False)
    assert oplist.active is None


# --- the lists -----------------------------------------------------------------------------------------------------

WEIGHT = torch.ones(8)
OPS = {
    "mm": lambda x: x @ x.t(),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "exp": torch.exp,
    "logsumexp": lambda x: x.logsumexp(0),
    "norm": lambda x: x.norm(),
    "add": lambda x: x + WEIGHT,
    "fft": lambda x: torch.fft.fft(x.float()).real,
    "gelu": F.gelu,
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
}


@both
@pytest.mark.parametrize("op", OPS)
def test_operations_follow_cudas_lists(op, dtype):
    """As a region does, whose lists are held against torch's header in test_oplist.py."""
    x = X.to(dtype)
    with Region(nn.Identity(), "bf16" if dtype == BF16 else "fp16", CPU):
        expected = OPS[op](x)
    with autocast("cpu", dtype):
        result = OPS[op](x)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_the_lists_stay_from_the_first_use_on():
    def formats():
        with torch.autocast("cpu", BF16):
            return X.to(BF16).softmax(-1).dtype

    assert formats() == BF16
    autocast("cpu", enabled=False)
    assert formats() == BF16
    autocast("cpu")
    assert formats() == FULL
    autocast_mode._standing.close()
    assert formats() == BF16
    assert (region_module._opened, oplist.active, cpu16.active) == ([], None, False)
    autocast("cpu")
    assert formats() == FULL


def test_threads_have_their_own_regions():
    seen, ready, go = {}, threading.Barrier(3), threading.Barrier(3)

    def work(name, region):
        if region is None:
            ready.wait()
            seen[name] = linear()(X).dtype, X.to(BF16).softmax(-1).dtype
            go.wait()
        else:
            with region:
                ready.wait()
                seen[name] = linear()(X).dtype, X.to(BF16).softmax(-1).dtype
                go.wait()

    regions = {"bf16": autocast("cpu", BF16), "fp16": autocast("cpu", FP16), "none": None}
    threads = [threading.Thread(target=work, args=item) for item in regions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"bf16": (BF16, FULL), "fp16": (FP16, FULL), "none": (FULL, BF16)}


# --- the backward pass, outside ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Its softmax is in fp32 by CUDA's lists, and in 16 bit by the CPU's."""

    def __init__(self):
        super().__init__()
        self.one, self.two = linear(0), linear(1)

    def forward(self, x):
        return self.two(self.one(x).softmax(-1)).square().sum()


def gradients(dtype, run_block, region=autocast):
    block = Block()
    with region("cpu", dtype):
        loss = run_block(block, X.clone().requires_grad_())
    loss.backward()
    return [parameter.grad for parameter in block.parameters()]


@both
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_what_it_computed(use_reentrant, dtype):
    plain = gradients(dtype, lambda block, x: block(x))
    again = gradients(dtype, lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant))
    assert all(map(torch.equal, again, plain))
    theirs = gradients(dtype, lambda block, x: block(x), torch.autocast)
    assert all(map(torch.equal, theirs, plain))  # the lists stay
    autocast_mode._standing.close()
    theirs = gradients(dtype, lambda block, x: block(x), torch.autocast)
    assert not all(map(torch.equal, theirs, plain))  # the block can tell


def test_without_the_lists_a_checkpoint_would_fail():
    """A test of the test above: recomputation notices another format."""
    with autocast("cpu"):
        loss = checkpoint(Block(), X.clone().requires_grad_(), use_reentrant=False)
    autocast_mode._standing.close()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()


@pytest.fixture
def widened(monkeypatch):
    """How many tensors cpu16's kernels widened: it is in use, not torch's own."""
    dtypes, own = [], cpu16._widen

    def widen(value):
        if isinstance(value, torch.Tensor):
            dtypes.append(value.dtype)
        return own(value)

    monkeypatch.setattr(cpu16, "_widen", widen)
    return dtypes


@both
def test_products_go_through_cpu16_in_forward_and_in_backward(widened, dtype):
    model = linear()
    with autocast("cpu", dtype):
        loss = model(X.clone().requires_grad_()).float().square().sum()
    assert widened.count(dtype) == 3  # addmm: bias, input, weight
    loss.backward()
    assert widened.count(dtype) == 7  # two products: for the weight and for the input


def test_a_cpu_with_the_instructions_does_without(widened, hardware):
    hardware["is"] = AMX
    with autocast("cpu", BF16):
        linear()(X).float().sum().backward()
    assert not cpu16.active
    assert widened == []


BF16_ONLY = type(CPU).of("cpu", "CPU with bf16", features=["avx512_bf16"])


@pytest.mark.parametrize("order", [(BF16, FP16), (FP16, BF16)])
def test_the_format_that_needs_cpu16_decides(order, hardware):
    hardware["is"] = BF16_ONLY
    for dtype in order:
        autocast("cpu", dtype)
    assert cpu16.active
    assert len(region_module._opened) == 2
    with Region(nn.Identity(), "bf16", BF16_ONLY):
        assert not cpu16.active
    assert cpu16.active


# --- beside regions and steppers -----------------------------------------------------------------------------------


def test_one_made_in_an_open_region_leaves_its_rules_alone():
    model = Net()
    region = Region(model, "bf16 module:blocks.0.0=fp32 op:relu=fp32", CPU)
    with region:
        autocast("cpu", FP16)
        model(torch.randn(2, 4))
        assert model.blocks[0][0].last[1] == FULL
        assert model.blocks[0][1].last[1] == BF16
        assert torch.relu(X.to(BF16)).dtype == FULL
    with autocast("cpu"):
        assert torch.relu(X.to(BF16)).dtype == BF16
        assert X.to(BF16).softmax(-1).dtype == FULL
        with region:
            assert torch.relu(X.to(BF16)).dtype == FULL
        assert torch.relu(X.to(BF16)).dtype == BF16
        assert X.to(BF16).softmax(-1).dtype == FULL


def test_module_rules_act_as_ever():
    policy = "bf16 module:blocks.1=fp32 module:head=fp16"
    before = run(Net(), policy)
    autocast("cpu")
    assert run(Net(), policy) == before


def test_a_stepper_takes_the_same_steps():
    def train():
        model = nn.Sequential(linear(), nn.GELU(), linear(1, 1))
        stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.1), "fp16", accumulate=2)
        for _ in range(6):
            stepper.step(lambda: model(X).float().square().mean())
        return [weight.detach() for weight in model.parameters()]

    before = train()
    autocast("cpu")
    assert all(map(torch.equal, train(), before))


# --- cast weights --------------------------------------------------------------------------------------------------

STEPS = {
    "plain": lambda p: torch.optim.SGD(p, lr=1.0),
    "fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1.0),
}


@pytest.mark.parametrize("optimizer", STEPS)
def test_a_step_inside_the_region_is_seen_at_once(optimizer):
    model = linear()
    step = STEPS[optimizer](model.parameters())
    with autocast("cpu", BF16):
        before = model(X)
        before.float().sum().backward()
        step.step()
        after = model(X)
        assert torch.equal(after, F.linear(X.to(BF16), model.weight.to(BF16), model.bias.to(BF16)))
    assert not torch.equal(after, before)


def test_the_hook_that_drops_casts_serves_every_device_and_goes(monkeypatch):
    """The regions of a CPU have one of their own, those of CUDA do not."""
    calls = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append(1))

    def clears():
        model = linear()
        model(X).sum().backward()
        calls.clear()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return len(calls)

    before = clears()
    for _ in range(2):
        autocast_mode._stand_by("cuda", FP16)
        assert clears() == before + 1
    autocast_mode._standing.close()
    assert clears() == before


# --- compiled ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@both
@pytest.mark.parametrize("stands", [True, False], ids=["stands by", "first use"])
@pytest.mark.parametrize("where", ["inside", "decorated", "outer object"])
def test_a_compiled_function_is_one_graph_with_the_same_lists(compiled, where, stands, dtype):
    model = linear()
    if where == "inside":

        def forward(x):
            with autocast("cpu", dtype):
                y = model(x)
                with autocast("cpu", enabled=False):
                    z = y.float() @ y.float().t()
                return y, y.softmax(-1), z, model(x)
    elif where == "decorated":

        @autocast("cpu", dtype)
        def forward(x):
            y = model(x)
            return y, y.softmax(-1), model(x)
    else:
        region = autocast("cpu", dtype)

        def forward(x):
            with region:
                y = model(x)
            return y, model(x)

    if not stands:
        autocast_mode._standing.close()
    function = compiled(forward)
    if not stands and where != "inside":
        autocast("cpu", dtype)
    results = function(X)
    expected = forward(X)
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    assert all(map(torch.equal, results, expected))
    if where != "outer object":
        assert results[1].dtype == FULL
    results[0].float().sum().backward()
    grad = model.weight.grad.clone()
    model.zero_grad()
    expected[0].float().sum().backward()
    assert torch.equal(grad, model.weight.grad)


@torch.no_grad()
def test_a_graph_that_breaks_inside_the_region_goes_on_in_it():
    torch._dynamo.reset()
    model = linear()

    def forward(x):
        with autocast("cpu", BF16):
            y = model(x)
            torch._dynamo.graph_break()
            return model(y), y.softmax(-1)

    assert [y.dtype for y in torch.compile(forward, backend="aot_eager")(X)] == [BF16, FULL]
    assert not torch.is_autocast_enabled("cpu")
    torch._dynamo.reset()


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@both
def test_on_a_gpu_it_is_torchs(dtype):
    results = []
    for function in (torch.autocast, autocast):
        model = linear().cuda()
        with function("cuda", dtype):
            output = model(X.cuda()).softmax(-1)
        output.sum().backward()
        results.append((output, model.weight.grad))
    assert all(map(torch.equal, *results))
    assert region_module._opened == []
