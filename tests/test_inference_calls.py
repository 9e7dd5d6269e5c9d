"""A cast model in use: gradients, other regions, threads, copies, another cast, its own forward, torch.compile."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import threading
import types
import weakref

import pytest
import torch
from reference.inference import assert_same, by_region, tensors
from reference.inference_nets import IDS, MODELS, Llama, build
from reference.nets import AMX, BF16, CPU, FP16, FULL, Net, Seen
from torch import nn

from halfstep import oplist
from halfstep.inference import cast_for_inference
from halfstep.region import Region

pytestmark = pytest.mark.usefixtures("kernels_stay")


def test_parameters_are_frozen_and_gradients_reach_inputs_that_ask():
    model = build(Net)
    model(torch.randn(2, 4)).sum().backward()
    parameters = list(model.parameters())
    cast_for_inference(model, "bf16", hardware=AMX)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)
    assert not model(torch.randn(2, 4)).requires_grad
    x = torch.randn(2, 4, requires_grad=True)
    model(x).float().sum().backward()
    assert x.grad.dtype == FULL
    assert x.grad.abs().sum() > 0


def test_casting_inside_inference_mode_leaves_a_model_that_works_outside():
    model, x = build(Net), torch.randn(2, 4, requires_grad=True)
    with torch.inference_mode():
        cast_for_inference(model, "bf16", hardware=AMX)
        assert torch.is_inference_mode_enabled()
    model(x).float().sum().backward()
    assert x.grad.abs().sum() > 0


def test_results_can_be_changed_and_trained_on():
    model, head, x = build(Net), nn.Linear(4, 2), torch.randn(2, 4)
    cast_for_inference(model, "bf16", hardware=AMX)
    features = model(x)
    features /= 2  # an inference tensor would refuse both
    head(features.float()).sum().backward()
    assert head.weight.grad is not None
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.no_grad():
        assert not model(x.requires_grad_()).requires_grad
    assert model(x).requires_grad


def test_the_region_is_closed_after_a_call_and_after_one_that_fails():
    class Modes(nn.Module):
        def forward(self, x, fail=False):
            self.seen = torch.is_autocast_enabled("cpu"), torch.backends.mha.get_fastpath_enabled()
            assert not fail
            return x

    model = nn.Sequential(Modes(), nn.MultiheadAttention(4, 2)).eval()
    model.forward = lambda *args: model[0](*args)
    cast_for_inference(model, "bf16", hardware=CPU)
    model(torch.ones(1))
    assert model[0].seen == (True, False)
    with pytest.raises(AssertionError):
        model(torch.ones(1), True)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.backends.mha.get_fastpath_enabled()
    assert oplist.active is None


def test_inside_other_regions_it_follows_its_own():
    model, x = build(Net), torch.randn(2, 4)
    expected = by_region(model, x, "bf16 module:head=fp32", CPU)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=CPU)
    with Region(nn.Linear(1, 1), "fp16", CPU):
        assert_same([model(x)], expected)
    with torch.autocast("cpu", dtype=FP16):
        assert_same([model(x)], expected)
    # As a part of a model that trains, too.
    whole = nn.Sequential(model, nn.Linear(4, 1))
    with Region(whole, "fp16 module:0=fp32", CPU):
        assert_same([whole[0](x)], expected)


def test_calls_from_several_threads():
    make, x = MODELS["encoder"]
    model = build(make)
    cast_for_inference(model, "bf16", hardware=AMX)
    expected, results, barrier = model(x), [], threading.Barrier(4)

    def call():
        barrier.wait()
        results.extend(model(x) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_copy_is_cast_too_and_has_its_own_weights():
    model, x = build(Net), torch.randn(2, 4)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=CPU)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(x).abs().max() == 0
    assert model(x).abs().max() > 0
    del model
    gc.collect()
    assert other(x).dtype == FULL
    cast_for_inference(other, "fp16", hardware=CPU)
    assert other(x).dtype == FP16


def test_a_pickled_model_is_whole_after_another_cast():
    model = build(Llama)
    cast_for_inference(model, "bf16", hardware=AMX)
    expected = tensors(model(IDS))
    other = pickle.loads(pickle.dumps(model))
    report = cast_for_inference(other, "bf16", hardware=AMX)
    assert report.num_bytes_before == report.num_bytes_after
    assert_same(tensors(other(IDS)), expected)
    fresh = build(Llama, seed=1)
    cast_for_inference(fresh, "bf16", hardware=AMX)
    fresh.load_state_dict(model.state_dict())
    assert_same(tensors(fresh(IDS)), expected)


def test_casting_again_replaces_the_region():
    model = build(lambda: nn.Sequential(nn.EmbeddingBag(32, 4), Seen(), nn.GRU(4, 4)))
    for policy, expected in (("bf16", BF16), ("fp16 module:2=fp32", FP16), ("bf16", BF16)):
        report = cast_for_inference(model, policy, hardware=CPU)
        model(IDS)
        assert model[1].last[1] == expected
    assert report.converted == ("0.weight", "1.linear.weight", "1.linear.bias")
    assert "forward" not in model[2].__dict__
    assert len(model[0]._forward_hooks) == len(model[0]._forward_pre_hooks) == len(model[2]._forward_pre_hooks) == 1
    assert len(inspect.getclosurevars(model.forward.__func__).nonlocals) == 2
    before = len(inspect.stack())

    class Depth(nn.Module):
        def forward(self, x):
            return len(inspect.stack()) - before

    model = Depth().eval()
    depths = set()
    for _ in range(5):
        cast_for_inference(model, "bf16", hardware=CPU)
        depths.add(model(0))
    assert len(depths) == 1


def test_a_forward_of_the_instance_is_called_and_its_arguments_are_seen():
    def double(self, x, scale: float = 2.0, *, text="t"):
        return scale * self.stem(x)

    bound, model, x = build(Net), build(Net), torch.randn(2, 4)
    bound.forward = double.__get__(bound)
    model.forward = functools.partial(double, model)
    for net in (bound, model):
        expected = by_region(net, x, "bf16", CPU)
        for _ in range(2):
            cast_for_inference(net, "bf16", hardware=CPU)
            assert_same([net(x, text="u")], expected)
            assert list(inspect.signature(net.forward).parameters) == ["x", "scale", "text"]
    other = copy.deepcopy(bound)
    other.stem.linear.weight.data.zero_()
    other.stem.linear.bias.data.zero_()
    cast_for_inference(other, "bf16", hardware=CPU)
    assert other(x).abs().max() == 0
    # A wrapper that copies our marks is still called.
    inner, log = bound.forward, []

    @functools.wraps(inner.__func__)
    def wrapper(self, *args):
        log.append(args)
        return inner(*args)

    bound.forward = types.MethodType(wrapper, bound)
    cast_for_inference(bound, "bf16", hardware=CPU)
    assert_same([bound(x)], expected)
    assert len(log) == 1


def test_a_cast_model_is_collected():
    model = build(Net)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=CPU)
    model(torch.randn(2, 4))
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_compiled_cast_model_gives_the_same_bits():
    model, x = build(Net), torch.randn(2, 4)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=AMX)
    for module in model.modules():
        module.formats = None
        if isinstance(module, Seen):
            module.forward = module.linear.forward
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)
