"""Blocks and bundles: what is gathered together, in which format, on one process that has nobody to gather from."""

import pytest
import torch
from reference.shard_nets import Attention, Block, Recurrent, Tied, Words, adapted
from torch import nn

from halfstep.distributed.blocks import block_around, blocks_of
from halfstep.distributed.bundles import MOST_FP32, bundles_of
from halfstep.policy import Policy

BF16 = Policy("bf16")


def gathered(net, policy="bf16", blocks=None):
    """Name of each parameter to (format, names of the modules that gather it); the model's own group has no module."""
    paths = {module: name for name, module in net.named_modules()}
    found = {name: ("fp32", ()) for name, _ in net.named_parameters()}
    names = {parameter: name for name, parameter in net.named_parameters()}
    for bundle in bundles_of(net, Policy.parse(policy), blocks_of(net, blocks)):
        for parameter in bundle.parameters:
            assert found[names[parameter]] == ("fp32", ()), "nothing is gathered twice"
            found[names[parameter]] = bundle.format, tuple(paths[module] for module in bundle.modules)
    return found


def test_products_are_gathered_block_by_block_and_the_rest_once_in_fp32():
    found = gathered(Words())
    low = {name: where for name, where in found.items() if where != ("fp32", ())}
    blocks = {f"blocks.{i}.{name}.weight": ("bf16", (f"blocks.{i}",)) for i in range(3) for name in ("up", "down")}
    assert low == {**blocks, "head.weight": ("bf16", ("head",))}
    assert (
        len(found) == len(low) + 1 + 3 * 5 + 3
    )  # the table, of each block norm, biases and gain, the last norm and bias


def test_an_fp32_policy_gathers_whole_blocks():
    found = gathered(Words(), "fp32")
    assert found["blocks.1.gain"] == found["blocks.1.up.weight"] == ("fp32", ("blocks.1",))
    assert found["head.weight"] == ("fp32", ())


def test_a_module_rule_is_honoured_in_both_directions():
    found = gathered(Words(), "bf16 module:head=fp32 module:table=bf16")
    assert found["head.weight"] == ("fp32", ())
    assert found["table.weight"] == ("bf16", ("table",))
    assert gathered(Words(), "fp32 module:blocks.*.up=bf16")["blocks.0.up.weight"] == ("fp32", ("blocks.0",))


def test_a_table_that_is_gathered_in_16_bit_hands_on_fp32():
    net = Words()
    (table,) = [b for b in bundles_of(net, Policy.parse("bf16 module:table=bf16"), {}) if net.table in b.modules]
    assert list(table.tables()) == [net.table]
    net.table.weight.data = net.table.weight.data.bfloat16()  # of a frozen model: it hands on what it does alone
    assert list(table.tables()) == []


@pytest.mark.parametrize(("width", "format"), [(2, "bf16"), (64, "fp32")])
def test_a_block_is_gathered_in_the_format_of_most_of_it(width, format):
    """What a rule keeps in fp32 goes with the norms while it is small, and else takes the block with it."""
    net = nn.Sequential(*(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, width)}) for _ in range(2)))
    found = gathered(net, "bf16 module:*.b=fp32")
    assert (64 * width > MOST_FP32 * 64 * (64 + width)) == (format == "fp32")
    assert found["0.a.weight"] == (format, ("0",))
    assert found["0.b.weight"] == ("fp32", () if format == "bf16" else ("0",))
    assert found["0.a.bias"] == ("fp32", () if format == "bf16" else ("0",))


class Custom(nn.Module):
    """A matrix that nobody knows what it is for, beside a product or alone."""

    def __init__(self, num_rows, has_product=True):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(num_rows, 16))
        self.product = nn.Linear(16, 16) if has_product else nn.Identity()


def test_a_matrix_of_unknown_use_stays_fp32_while_it_is_small():
    assert gathered(nn.Sequential(Custom(2), Custom(2)))["0.matrix"] == ("fp32", ())
    assert gathered(nn.Sequential(Custom(3), Custom(3)))["0.matrix"] == ("bf16", ("0",))
    assert gathered(nn.Sequential(Custom(2, False), Custom(2, False)))["0.matrix"] == ("bf16", ("0",))
    assert gathered(nn.Sequential(Custom(64)))["0.matrix"] == ("fp32", ())  # outside blocks, always
    assert gathered(nn.Sequential(Custom(64)), "bf16 module:0=bf16")["0.matrix"][0] == "bf16"


def test_what_is_fp32_by_the_rule_of_master_weights_is_here():
    found = gathered(Recurrent())
    assert all(where == ("fp32", ()) for where in found.values())  # weight_norm's, and a layer that computes in fp32
    net = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4))
    assert gathered(net)["0.weight"] == ("fp32", ())
    assert gathered(net)["1.weight"] == ("bf16", ("1",))


def test_a_tied_weight_is_gathered_once_and_where_all_its_users_see_it():
    net = Tied()
    assert gathered(net)["table.weight"] == ("fp32", ())
    assert gathered(net, "bf16 module:table=bf16")["table.weight"] == ("bf16", ("table", "head", "other"))
    net.blocks[0].up.weight = net.blocks[1].up.weight
    assert gathered(net)["blocks.0.up.weight"] == ("fp32", ())


def test_adapters_are_gathered_with_what_they_adapt():
    found = gathered(adapted(torch.bfloat16))
    assert found["blocks.0.up.a.weight"] == found["blocks.0.up.frozen.weight"] == ("bf16", ("blocks.0",))


def test_repeated_parts_are_blocks():
    assert list(blocks_of(Words())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Attention())) == ["encoder.layers.0", "encoder.layers.1"]
    nested = nn.ModuleDict({"a": nn.ModuleList([Words(), Words()]), "b": nn.Sequential(Block(), nn.ReLU(), Block())})
    assert list(blocks_of(nested)) == ["a.0", "a.1", "b.0", "b.2"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == {}  # no parts of their own
    assert blocks_of(nn.ModuleList([Block()])) == {}


def test_blocks_can_be_named_by_class_or_pattern():
    assert list(blocks_of(Words(), [Block])) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Words(), Block)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Words(), ["blocks.[01]", "head"])) == ["blocks.0", "blocks.1", "head"]
    assert block_around("blocks.1.up", blocks_of(Words())) == "blocks.1"
    assert block_around("head", blocks_of(Words())) == ""


def test_what_transformers_does_not_split_is_a_block():
    net = nn.ModuleList([nn.Sequential(Words(), Words()), nn.Sequential(Words(), Words())])
    assert list(blocks_of(net)) == ["0", "1"]
    net._no_split_modules = ["Block"]
    assert len(blocks_of(net)) == 4 * 3


def test_a_block_in_a_block_holds_what_is_its_own():
    found = gathered(Words(), blocks=[Block, "blocks.1.up"])
    assert found["blocks.1.up.weight"] == ("bf16", ("blocks.1.up",))
    assert found["blocks.1.down.weight"] == ("bf16", ("blocks.1",))


def test_a_large_table_in_a_block_takes_the_block_with_it_and_is_not_of_unknown_use():
    net = nn.Sequential(*(nn.ModuleDict({"table": nn.Embedding(99, 16), "a": nn.Linear(16, 16)}) for _ in range(2)))
    assert gathered(net)["0.table.weight"] == gathered(net)["0.a.weight"] == ("fp32", ("0",))
