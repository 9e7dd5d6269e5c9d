"""Shards under fully_shard that somebody else has called: what fits the policy, what is said of it, what is refused."""

import warnings

import pytest
import torch
from reference.shard_nets import Words, whole
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from halfstep import HalfstepError, Stepper
from halfstep.gradients import gradients_of, norms_of
from halfstep.ranks.gathers import gathers_of
from halfstep.ranks.shards import Shards

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def plain(mesh=None, net=None, **formats):
    """A model as torch's own pages shard it."""
    torch.manual_seed(0)
    net = Words() if net is None else net
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**formats))
    return net


def train(net, policy, num_steps=3):
    """(losses, what was warned of) of some steps, each on words of this rank's own; 3 ends with an evaluation."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        stepper = Stepper(net, optimizer, policy, max_norm=1.0, watch=False)
    words = torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(distributed.get_rank()))
    reports = [stepper.step(lambda: cross_entropy(net(words), words.flatten())) for _ in range(num_steps)]
    return [r.loss for r in reports], [str(each.message) for each in said], stepper


ROUNDING = {
    "nothing": {},
    "fp32": {"param_dtype": FP32},
    "careful": {"param_dtype": BF16, "reduce_dtype": FP32, "cast_forward_inputs": False},
    "usual": {"param_dtype": BF16, "reduce_dtype": FP32},
    "left out": {"param_dtype": BF16},
    "output": {"reduce_dtype": BF16, "output_dtype": BF16},
}


def run_plain(policy):
    found = {}
    for name, formats in ROUNDING.items():
        losses, said, stepper = train(plain(**formats), policy)
        found[name] = losses, said, dict(stepper.ranks.describe())
    return found


def test_a_model_that_the_user_has_sharded_trains_and_what_it_rounds_is_said_once(world2):
    found, others = world2.run(run_plain, "bf16")
    assert all(losses[-1] < losses[0] for losses, _, _ in found.values())
    assert not any(said for _, said, _ in others.values())  # rank 0 speaks for all
    assert found["nothing"][1] == found["fp32"][1] == []
    (careful,), (usual,), (left_out,), (output,) = (found[name][1] for name in list(ROUNDING)[2:])
    names = "blocks.0.gain, blocks.0.norm.weight, blocks.0.norm.bias, ..."
    vectors = f"rounds 11 weights to bf16 that the policy keeps in fp32 ({names})"
    assert vectors in careful
    assert "cast_forward_inputs" not in careful
    assert vectors in usual
    assert "rounds what flows from block to block (cast_forward_inputs)" in usual
    assert "reduce_dtype" not in usual
    assert "adds gradients up in bf16 (reduce_dtype). halfstep.distributed.shard(model, policy) does not." in left_out
    assert output.startswith("fully_shard, as this model was sharded, rounds outputs (output_dtype); adds gradients up")
    assert found["usual"][2] == {
        "engine": "fully_shard",
        **{f"shards of blocks.{i}": "bf16 weights, fp32 gradients" for i in range(3)},
        "shards of the model": "bf16 weights, fp32 gradients",
    }
    assert found["left out"][2]["shards of blocks.0"] == "bf16 weights, bf16 gradients"


def refusals():
    said = {}

    def hear(name, net, policy):
        try:
            train(net, policy, num_steps=0)
        except HalfstepError as error:
            said[name] = str(error)

    hear("fp16", plain(param_dtype=FP16), "bf16")
    hear("fp32", plain(param_dtype=BF16), "fp32")
    hear("rule", plain(param_dtype=BF16), "bf16 module:head=fp32")
    hear("shards", plain(net=Words().bfloat16()), "bf16")
    hear("master", plain(), "bf16 master=split16")
    hear("promote", plain(), "fp16 on_exhausted=promote")
    net = Words()
    outside = set(net.norm.parameters())
    hear("outside", fully_shard(net, ignored_params=outside), "bf16")
    frozen = Words()
    frozen.norm.requires_grad_(False)
    hear("frozen", fully_shard(frozen, ignored_params=set(frozen.norm.parameters())), "bf16")
    return said


def test_what_contradicts_the_policy_is_refused(world2):
    said, others = world2.run(refusals)
    assert said == others
    assert "policy bf16 over fully_shard with param_dtype=torch.float16: parameter" in said["fp16"]
    assert "reaches the model in fp16, and the policy computes in bf16 there" in said["fp16"]
    assert "reaches the model in bf16, and the policy computes in fp32 there" in said["fp32"]
    assert "parameter head.weight reaches the model in bf16, and the policy computes in fp32" in said["rule"]
    assert "loses every update under half its last place" in said["shards"]
    assert "the fp32 weights as shards already" in said["master"]
    assert "on_exhausted=promote where each forward pass needs all ranks" in said["promote"]
    assert "parameter norm.weight outside the shards of fully_shard" in said["outside"]
    assert "frozen" not in said


def formats_of(policy):
    net = plain(param_dtype=BF16, reduce_dtype=FP32)
    net.head.weight.requires_grad_(False)
    frozen, trained = ({g.name: g for g in gathers_of(net)}[name] for name in ("head.weight", "norm.weight"))
    return [(g.kept, g.gathered, g.reduced) for g in (frozen, trained)]


def test_formats_are_read_from_the_groups(world2):
    assert world2.run(formats_of, "bf16")[0] == [(FP32, BF16, None), (FP32, BF16, FP32)]


def names_after_evaluation(how):
    net = plain(param_dtype=BF16, reduce_dtype=FP32)
    _, _, stepper = train(net, "bf16")
    words = torch.zeros(1, 2, dtype=torch.long)
    with stepper.inference():
        net(words)
    shards = [hasattr(parameter, "full_tensor") for parameter in net.parameters()]
    state = stepper.state_dict()
    with torch.no_grad():
        net(words)
    return all(shards), state["num_steps"], all(hasattr(p, "full_tensor") for p in net.parameters())


def test_after_an_evaluation_parameters_are_shards_again(world2):
    assert world2.run(names_after_evaluation, None) == [(True, 3, True)] * 2


def norms(shape):
    """(norms of gradients as Shards finds them, as one process does over whole ones), of a mesh of this shape."""
    names = ("replicate", "shard")[2 - len(shape) :]
    net = plain(init_device_mesh("cpu", shape, mesh_dim_names=names), net=Words(num_out=3, inner=2))
    shards = Shards(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    words = torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(distributed.get_rank()))
    cross_entropy(net(words), words.flatten()).backward()
    gradients = gradients_of(optimizer)
    total = shards.total(gradients, *norms_of(gradients.values()), torch.tensor(1.0), 2.0)
    expected = torch.stack([whole(p.grad).norm() for p in net.parameters()])
    return total.norms, total.norm, expected, float(total.count)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_shard_counts_once_whatever_holds_it(world4, shape):
    for each, norm, expected, count in world4.run(norms, shape):
        torch.testing.assert_close(each, expected, rtol=1e-6, atol=0)
        assert norm.item() == pytest.approx(expected.norm().item(), rel=1e-6)
        assert count == 2.0


def with_ddp_inside():
    net = plain()
    model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), net)
    try:
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", watch=False)
    except HalfstepError as error:
        return str(error)


def test_two_engines_in_one_model_are_refused(world2):
    assert "both DistributedDataParallel and DTensor parameters" in world2.run(with_ddp_inside)[0]
