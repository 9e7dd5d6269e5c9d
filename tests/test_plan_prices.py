"""Names, what goes together, and the order of prices."""

import pytest

from halfstep.errors import HalfstepError
from halfstep.plan.prices import KINDS, ordered, parse, price_key, price_of
from halfstep.plan.stacks import COSTS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_is_found_by_its_example_and_has_a_price(kind):
    found, number = parse(kind.example)
    assert found is kind
    assert bool(number) == kind.takes_number
    assert kind.price.startswith("none") or any(f"{word}: " in kind.price for word in COSTS)


def test_the_number_of_a_family_is_read():
    assert parse("lora=8")[1] == 8
    assert parse("accumulate=2")[1] == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora", "there is none of this name. Use fused, "),
        ("checkpoint", "there is none of this name"),
        ("lora=", "its number is a whole one from 1. Use lora=16"),
        ("lora=0", "its number is a whole one from 1"),
        ("lora=-4", "its number is a whole one from 1"),
        ("lora=²", "its number is a whole one from 1"),
        ("accumulate=1", "its number is a whole one from 2. Use accumulate=4"),
        ("split16=2", "there is none of this name"),
    ],
)
def test_what_is_no_technique_is_refused(name, message):
    with pytest.raises(HalfstepError, match=message):
        parse(name)


def test_a_stack_is_put_in_order():
    assert ordered(["4bit", "16bit", "lora=4", "fused"]) == ("fused", "lora=4", "16bit", "4bit")


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (["fused", "adamw8bit"], "techniques fused and adamw8bit: both set the optimizer"),
        (["checkpointing", "checkpointing=selective"], "both set the checkpointing"),
        (["lora=4", "split16"], "techniques lora=4 and split16: the weights that train then are the adapter's alone"),
        (["4bit"], "technique 4bit alone: it stores weights that do not train"),
    ],
)
def test_what_does_not_go_together_is_refused(stack, message):
    with pytest.raises(HalfstepError, match=message):
        ordered(stack)


def test_the_dearest_technique_decides_then_the_next():
    stacks = [(), ("fused",), ("checkpointing",), ("fused", "checkpointing"), ("adamw8bit",), ("lora=8",)]
    keys = [price_key(names) for names in stacks]
    assert keys == sorted(set(keys))
    assert price_key(("checkpointing", "fused")) == price_key(("fused", "checkpointing"))


def test_prices_are_listed_by_name():
    (text,) = price_of(("checkpointing",))
    assert text.startswith("checkpointing: time: ")
    assert "+33 %" in text
