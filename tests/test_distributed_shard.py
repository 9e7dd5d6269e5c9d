"""shard(): a model cut over ranks trains as it would on one device, bit for bit where sums have the same order."""

import copy
import warnings

import pytest
import torch
from reference.nets import CPU
from reference.shard_nets import NETS, NUM_WORDS, Block, Words, distance, train, whole
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import halfstep
from halfstep import HalfstepError, Stepper
from halfstep.distributed.sharding import shard


def words_of(rank):
    return torch.randint(0, NUM_WORDS, (3, 5), generator=torch.Generator().manual_seed(rank))


def micro_batch(net, policy, ranks):
    """The gradients of one micro-batch of each of ``ranks``, summed, and the formats of the model's buffers."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    stepper = Stepper(net, torch.optim.SGD(parameters, lr=0.1), policy, accumulate=9, watch=False)
    for rank in ranks:
        words = words_of(rank)
        stepper.step(lambda words=words: (cross_entropy(net(words), words.flatten() % 3, reduction="sum"), 1.0))
    gradients = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return gradients, {buffer.dtype for buffer in net.buffers() if buffer.is_floating_point()}


def gradients_of_all(policy, num_ranks):
    """Of every net, by name."""
    found = {}
    for kind, build in NETS.items():
        torch.manual_seed(0)
        net = build()
        if distributed.is_initialized():
            found[kind] = micro_batch(shard(net, policy), policy, [distributed.get_rank()])
        else:
            found[kind] = micro_batch(net, policy, range(num_ranks))
    return found


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale=static scale.init=1024"])
def test_gradients_are_those_of_one_process_bit_for_bit(world2, policy):
    expected = gradients_of_all(policy, 2)
    for found in world2.run(gradients_of_all, policy, 2):
        for kind, (gradients, formats) in found.items():
            wanted, _ = expected[kind]
            assert gradients.keys() == wanted.keys()
            assert formats <= {torch.float32}
            for name, gradient in gradients.items():
                # The engine's are means over two ranks, and halving is exact. Where a weight is used twice, or what
                # goes into a block also goes around it, more than two gradients are added up, in another order.
                margin = 2.0**-21 * wanted[name].abs().max() if kind == "Tied" else 0.0
                assert (gradient * 2 - wanted[name]).abs().max() <= margin, (kind, name)


def run_shards(kind, policy, num_ranks, settings):
    return train(kind, policy, num_ranks, **settings)


HAIRS = (2.0**-22, -(2.0**-22), 2.0**-21)


def check_run(world, kind, policy, **settings):
    """The largest differences are no more than 4 times what they are between runs of one process whose learning rates
    differ by a hair, since 16 bit spreads a last bit; or what it takes to add up in another order: 1e-6 of a loss, 1e-5
    of a norm, a hundredth of what a step moves a weight."""
    runs = world.run(run_shards, kind, policy, world.num, settings)
    for reports, weights in runs[1:]:
        assert repr(reports) == repr(runs[0][0])
        assert all(torch.equal(weights[name], runs[0][1][name]) for name in weights)
    alone = {name: value for name, value in settings.items() if name != "mesh"}
    one = train(kind, policy, world.num, **alone)
    found = distance(runs[0], one)
    if not is_within(found, (0.0,) * 3):
        of_hairs = [distance(train(kind, policy, world.num, hair=hair, **alone), one) for hair in HAIRS]
        assert is_within(found, [max(each) for each in zip(*of_hairs, strict=True)]), (found, of_hairs)
    return runs[0], one


def is_within(found, of_a_hair):
    limits = zip(of_a_hair, (1e-6, 1e-5, 1e-4), strict=True)
    return all(a <= max(4 * b, least) for a, (b, least) in zip(found, limits, strict=True))


def test_forty_steps_give_the_losses_of_one_process(world2):
    (reports, _), (expected, _) = check_run(world2, "Words", "bf16")
    assert [r[0] for r in reports] == [r[0] for r in expected]
    assert reports[-1][0] < reports[0][0] / 2


def test_a_replay_of_all_ranks_loses_no_sample(world2):
    settings = {"accumulate": 3, "max_norm": 0.5, "fused": False, "spikes": 0.1, "num_steps": 8, "hardware": CPU}
    (reports, _), _ = check_run(world2, "Words", "fp16", **settings)
    assert all(r[3] for r in reports)
    assert sum(r[4] for r in reports) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "fused"), [(1, True), (3, False)])
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_every_net_trains_as_one_process_does(world2, policy, kind, accumulate, fused):
    if (policy, kind) == ("fp32", "AdaptedBf16"):
        pytest.skip("a product of fp32 and bf16 is none on one device either")
    check_run(world2, kind, policy, accumulate=accumulate, fused=fused, max_norm=0.5, spikes=0.1)


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_four_ranks_and_a_dimension_of_two(world4, mesh):
    """So that two ranks have nothing of it; with a mesh of two dimensions each half holds everything."""
    check_run(world4, "Uneven", "bf16", mesh=mesh, max_norm=0.5, num_steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["Words", "Uneven", "Tied", "Recurrent", "AdaptedBf16"])
def test_four_ranks_train_as_one_process_does(world4, kind, policy, mesh):
    if (policy, kind) == ("fp32", "AdaptedBf16"):
        pytest.skip("a product of fp32 and bf16 is none on one device either")
    check_run(world4, kind, policy, mesh=mesh, max_norm=0.5, accumulate=3, spikes=0.1)


COLLECTIVES = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",  # its name before torch 2.13
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
}


def counted(function, kind, nums):
    def count(*args, **kwargs):
        nums[kind] += 1
        return function(*args, **kwargs)

    return count


def collectives_of(how):
    torch.manual_seed(0)
    net = Words()
    if how == "plain":
        format = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in net.blocks:
            fully_shard(block, mp_policy=format)
        fully_shard(net, mp_policy=format)
    else:
        shard(net, "bf16", reshard_after_forward=how != "kept")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what plain fully_shard rounds: tests/test_ranks_shards.py
        micro_batch(net, "bf16", [distributed.get_rank()])
        nums = {"gather": 0, "reduce": 0}
        for name, kind in COLLECTIVES.items():
            if hasattr(distributed, name):
                patch.setattr(distributed, name, counted(getattr(distributed, name), kind, nums))
        micro_batch(net, "bf16", [distributed.get_rank()])
    return nums


def test_norms_in_fp32_cost_one_gather_and_one_reduction_for_the_whole_model(world2):
    plain, ours, kept = (world2.run(collectives_of, how)[0] for how in ("plain", "ours", "kept"))
    assert plain == {"gather": 3 + 1 + 3, "reduce": 3 + 1}  # blocks, the rest, blocks again
    assert ours == {"gather": plain["gather"] + 1, "reduce": plain["reduce"] + 1}
    assert kept == {"gather": ours["gather"] - 3, "reduce": ours["reduce"]}


def ranks_that_begin_apart(mesh):
    torch.manual_seed(distributed.get_rank())
    net = NETS["Recurrent"]()
    net.norm.running_mean.normal_()
    first = copy.deepcopy(net.state_dict())
    shard(net, "bf16")
    return first, {name: whole(value) for name, value in net.state_dict().items()}


def test_all_begin_with_the_weights_and_buffers_of_rank_0(world2):
    (first, begun), (_, others) = world2.run(ranks_that_begin_apart, None)
    assert first.keys() == begun.keys()
    assert all(torch.equal(first[name], begun[name]) and torch.equal(begun[name], others[name]) for name in first)


def begin_on_meta(mesh):
    with torch.device("meta"):
        net = Words()
    shard(net, "bf16")
    net.to_empty(device="cpu")
    torch.manual_seed(7)  # alike on all ranks: torch draws the whole tensor's numbers, and each keeps its part
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, Block):
            nn.init.constant_(module.gain, 0.7)
    stepper = Stepper(net, torch.optim.AdamW(net.parameters(), lr=1e-2), "bf16", watch=False)
    begun = {name: whole(p).clone() for name, p in net.named_parameters()}
    words = words_of(distributed.get_rank())
    reports = [stepper.step(lambda: cross_entropy(net(words), words.flatten())) for _ in range(3)]
    return begun, [r.loss for r in reports]


def test_a_model_on_meta_is_drawn_as_shards(world2):
    (begun, losses), (others, _) = world2.run(begin_on_meta, None)
    assert all(torch.equal(begun[name], others[name]) for name in begun)
    weight = begun["blocks.0.up.weight"]  # uniform up to 1 / sqrt(16), of 32 rows, of which a rank drew 16
    assert weight.abs().max() <= 0.25
    assert weight.std() == pytest.approx(0.25 / 3**0.5, rel=0.1)
    assert not torch.equal(weight[:16], weight[16:])
    assert losses[-1] < losses[0]


def refusals():
    """What each of these says, by name."""
    said = {}

    def hear(name, function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except HalfstepError as error:
            said[name] = str(error)

    def net_with(name, parameter):
        net = Words()
        net.register_parameter(name, nn.Parameter(parameter))
        return net

    table = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    hear("scalar", shard, net_with("temperature", torch.tensor(1.0)), "bf16")
    hear("strided", shard, net_with("turned", torch.zeros(3, 4).mT), "bf16")
    hear("bf16", shard, Words().bfloat16(), "bf16")
    hear("fp64", shard, Words().double(), "bf16")
    hear("max_norm", shard, table, "bf16")
    hear("twice", shard, shard(Words(), "bf16"), "bf16")
    hear("block", shard, Words(), "bf16", blocks=["layers.*"])
    hear("class", shard, Words(), "bf16", blocks=[nn.GRU])
    hear("rule", shard, Words(), "bf16 module:tail=fp32")
    hear("policy", shard, Words(), "bf17")
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1, 2))
    hear("mesh", shard, Words(), "bf16", mesh=mesh)
    hear("one rank", shard, Words() if distributed.get_rank() else Words().double(), "bf16")
    hear("different", shard, Words(num_out=3 + distributed.get_rank()), "bf16")
    return said


def test_what_cannot_be_cut_is_refused_on_every_rank(world2):
    said, others = world2.run(refusals)
    assert said == others
    for name, part in {
        "scalar": "parameter temperature, a single number",
        "strided": "parameter turned (shape (4, 3)), which is not contiguous",
        "bf16": "trainable parameter table.weight (shape (11, 16)) in bfloat16: a weight in 16 bit loses every update",
        "fp64": "trainable parameter table.weight (shape (11, 16)) in float64: fully_shard reduces",
        "max_norm": "embedding 0 with max_norm: it scales its rows in place",
        "twice": "shard() of a model with FSDPWords in it",
        "block": "blocks='layers.*': no module of the model",
        "class": "blocks=GRU: no module of the model",
        "rule": "module rule 'tail'",
        "policy": "'bf17'",
        "mesh": "a mesh of 2 dimensions without names",
        "one rank": "rank 0: trainable parameter table.weight",
        "different": "shard() of a model that is not the same on all ranks",
    }.items():
        assert part in said[name], name


def test_without_ranks_it_is_the_model_itself(monkeypatch):
    net = Words()
    assert halfstep.distributed.shard(net, "bf16") is net
    assert not isinstance(net, FSDPModule)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HalfstepError, match=r"one of 2 processes that do not know of each other.*start\(\) first"):
        shard(net, "bf16")


def compiled(policy):
    words, losses = words_of(distributed.get_rank()), []
    for wrap in (lambda net: net, lambda net: torch.compile(net, backend="aot_eager")):
        torch.manual_seed(0)
        net = shard(Words(), policy)
        model = wrap(net)
        stepper = Stepper(model, torch.optim.AdamW(net.parameters(), lr=1e-2), policy, watch=False)
        reports = [stepper.step(lambda m=model: cross_entropy(m(words), words.flatten())) for _ in range(3)]
        losses.append([r.loss for r in reports])
    return losses


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_losses(world2):
    eager, by_compiler = world2.run(compiled, "bf16")[0]
    assert by_compiler == eager


@pytest.mark.gpu
def test_a_model_on_the_cpu_moves_to_where_nccl_works():
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        net = shard(Words(), "bf16")
        stepper = Stepper(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), "bf16", watch=False)
        words = words_of(0).cuda()
        losses = [stepper.step(lambda: cross_entropy(net(words), words.flatten())).loss for _ in range(5)]
        assert {p.device.type for p in net.parameters()} == {"cuda"}
        assert losses[-1] < losses[0]
    finally:
        distributed.destroy_process_group()
