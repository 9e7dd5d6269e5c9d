"""Which weights the meter for lost updates counts: what is an update, gradients of every kind, and the sample."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from reference.update_nets import Holder, MasterSGD, adamw, net, step, train
from torch import nn

from halfstep.updates import UpdateMeter, _draw, _take_sparse

# --- what counts as an update ----------------------------------------------------------------------------------------


def test_rows_that_are_not_in_the_batch_do_not_count():
    torch.manual_seed(0)
    model = nn.Embedding(20, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    model(torch.tensor([3, 5, 3])).float().sum().backward()
    optimizer.step()
    (module,) = meter.report().modules
    assert (module.num_samples, module.unmoved_pct, module.module) == (8, 0.0, "")
    assert "the model itself" in str(meter.report())


def test_a_weight_that_only_momentum_moves_counts():
    model = Holder(torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = UpdateMeter(model, optimizer, every=2)
    step(optimizer, torch.ones(10, dtype=torch.bfloat16))
    gradient = torch.zeros(10, dtype=torch.bfloat16)
    gradient[:2] = -0.9  # cancels the momentum of the first two
    step(optimizer, gradient)
    (module,) = meter.report().modules
    assert (module.num_samples, module.unmoved_pct) == (10, pytest.approx(20))


def test_a_step_without_any_update_says_so():
    model = Holder(torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = UpdateMeter(model, optimizer, every=1)
    for gradient in (torch.zeros(10, dtype=torch.bfloat16), None):
        step(optimizer, gradient)
        assert str(meter.report()) == f"No sampled weight had an update in step {meter.num_steps}."


def test_only_weights_that_this_optimizer_holds_are_watched():
    model = net()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[2].parameters()], lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    train(model, optimizer)
    (module,) = meter.report().modules
    assert (module.module, module.num_samples) == ("2", 256)


def test_a_shared_weight_counts_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, torch.ones(8, 8, dtype=torch.bfloat16))
    (module,) = meter.report().modules
    assert (module.module, module.num_weights) == ("0", 64)


def test_a_master_without_a_gradient_on_the_parameter_shows_its_updates():
    model = Holder(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterSGD(model.parameters(), 2.0**-12)
    (parameter,) = model.parameters()
    optimizer.step = lambda: None
    meter = UpdateMeter(model, optimizer, every=1, exact=optimizer.exact)
    meter._before_step(optimizer, (optimizer,), {})
    optimizer.masters[parameter][:3] -= 2.0**-12
    meter._after_step(optimizer, (optimizer,), {})
    (module,) = meter.report().modules
    assert (module.num_samples, module.below_half_ulp_pct, module.unmoved_pct) == (3, 100.0, 0.0)


def test_shares_weigh_as_many_weights_as_a_sample_stands_for():
    # 1000 weights that move, of which 10 are sampled, and 10 that do not.
    model = Holder(torch.zeros(1000, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    meter = UpdateMeter(model, optimizer, every=1, num_samples=10)
    step(optimizer, torch.ones(1000, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16))
    report = meter.report()
    assert report.unmoved_pct == pytest.approx(100 * 10 / 1010)
    assert report.modules[0].median_ulps > 0


def test_formats_of_one_module_stand_apart():
    model = Holder(torch.ones(8, dtype=torch.float16), torch.ones(8, dtype=torch.bfloat16), torch.ones(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)  # an ulp of fp16 above 1, an eighth of bf16's
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, *(torch.full_like(p, -1.0) for p in model.parameters()))
    shares = {module.format: module.unmoved_pct for module in meter.report().modules}
    assert shares == {"fp16": 0.0, "bf16": 100.0}


# --- gradients of every kind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sparse", [1, 2])
@pytest.mark.parametrize("places", [[[3, 1, 3, 7], [0, 2, 0, 1]], [[], []]])
def test_a_sparse_gradient_is_looked_up(num_sparse, places):
    indices = torch.tensor(places[:num_sparse], dtype=torch.int64)
    values = torch.arange(1.0, 1 + indices.shape[1] * 3 ** (3 - num_sparse)).reshape(-1, *[3] * (3 - num_sparse))
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        gradient = torch.sparse_coo_tensor(indices, values, (8, 3, 3))
    index = torch.randperm(72, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_take_sparse(gradient, index), gradient.to_dense().take(index))


def test_sparse_and_dense_gradients_give_one_report():
    reports = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(50, 8, sparse=sparse).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
        meter = UpdateMeter(model, optimizer, every=1, num_samples=300)
        model(torch.tensor([3, 5, 3, 49, 0])).float().square().sum().backward()
        optimizer.step()
        reports.append(meter.report())
    assert reports[0] == reports[1]
    assert reports[0].modules[0].num_samples > 0


@pytest.mark.parametrize("by_keyword", [False, True])
def test_gradients_that_a_closure_makes(by_keyword):
    model = Holder(torch.ones(10, dtype=torch.bfloat16))
    (parameter,) = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    meter = UpdateMeter(model, optimizer, every=1)
    parameter.grad = torch.ones(10, dtype=torch.bfloat16)  # of the step before

    def closure():
        parameter.grad = torch.tensor([1.0] * 4 + [0.0] * 6, dtype=torch.bfloat16)

    optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert meter.report().modules[0].num_samples == 4


@pytest.mark.parametrize("shape", ["transposed", "channels last"])
def test_a_weight_laid_out_otherwise(shape):
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3).bfloat16()
    weight = weight.transpose(0, 1) if shape == "transposed" else weight.to(memory_format=torch.channels_last)
    model = Holder(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    gradient = torch.randn(weight.shape).bfloat16()
    gradient[1] = 0.0
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, gradient)
    moved = (next(model.parameters()) != weight)[gradient != 0]
    assert meter.report().unmoved_pct == pytest.approx(100 * (1 - moved.float().mean().item()), abs=1e-4)
    assert not moved.all()


# --- the sample ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 7, 100, 1024, 1025, 5000])
def test_the_sample_is_one_of_each_stretch_and_all_of_a_small_weight(num):
    index = _draw(torch.empty(num), 1024, torch.Generator().manual_seed(0))
    assert len(index) == min(num, 1024)
    assert index.diff().gt(0).all()
    assert index[0] >= 0
    assert index[-1] < num
    if num <= 1024:
        assert index.tolist() == list(range(num))


def test_the_error_of_a_share_is_the_one_that_is_stated():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(100_000, generator=generator) < 0.3
    weight = torch.empty(100_000)
    shares = torch.stack([mask[_draw(weight, 256, generator)].double().mean() for _ in range(400)])
    stated = math.sqrt(0.3 * 0.7 / 256)
    # A standard deviation of 400 draws is known to 1 / sqrt(800) = 3.5 %, their mean to stated / 20; three of each.
    assert shares.std() == pytest.approx(stated, rel=0.11)
    assert shares.mean() == pytest.approx(mask.double().mean().item(), abs=3 * stated / 20)


def test_the_sample_is_the_same_for_every_meter():
    model = nn.Linear(100, 100).bfloat16()
    first, second = (UpdateMeter(model, adamw(model, 1e-3), num_samples=10) for _ in range(2))
    assert first.report() == second.report()  # draws them
    for one, other in zip(first._samples, second._samples, strict=True):
        assert torch.equal(one.index, other.index)


def test_a_parameter_without_elements_is_left_out():
    model = Holder(torch.empty(0, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    meter = UpdateMeter(model, optimizer, every=1)
    step(optimizer, *(torch.ones_like(p) for p in model.parameters()))
    assert meter.report().modules[0].num_weights == 4


def test_a_sharded_weight_is_measured_on_its_own_part():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.ones(8, 4, dtype=torch.bfloat16), mesh, [Shard(0)])
        model = Holder(weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
        meter = UpdateMeter(model, optimizer, every=1)
        step(optimizer, torch.ones_like(weight))
        (module,) = meter.report().modules
        assert (module.num_weights, module.num_samples, module.unmoved_pct) == (32, 32, 100.0)
    finally:
        dist.destroy_process_group()
