"""Targets of a plan: every card of the catalogue, memory alone, this CPU, and names that cannot be meant."""

import math

import pytest

from halfstep.errors import HalfstepError
from halfstep.hardware import CARDS
from halfstep.plan.target import DEFAULT_CAPABILITY, target_of


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_card_computes_in_the_formats_that_its_vendor_states_a_rate_for(card):
    target = target_of(card.name)
    assert target.card is card
    assert target.is_cuda
    assert target.is_named
    assert target.memory_gib == card.memory_gib
    assert target.capability == card.capability
    assert target.hardware.native == {"fp32", *card.rates_tflops}
    assert all(target.hardware.why.values())


@pytest.mark.parametrize("name", ["MI300X", "MI250X"])
def test_a_card_without_a_capability_names_its_source_for_each_format(name):
    target = target_of(name)
    assert target.capability is None
    assert {"bf16", "fp16"} <= target.hardware.native
    assert target.hardware.why["bf16"].endswith("states a rate for it")
    assert target.hardware.why["e4m3"].endswith("states no rate for it")


@pytest.mark.parametrize("name", ["rtx 3070", "NVIDIA GeForce RTX 3070", "RTX3070"])
def test_a_card_has_the_names_that_people_and_torch_give_it(name):
    assert target_of(name).name == "RTX 3070"


def test_memory_alone_is_a_card_of_the_first_capability_with_bf16():
    target = target_of(None, 10.5)
    assert (target.memory_gib, target.capability, target.is_named) == (10.5, DEFAULT_CAPABILITY, False)
    assert "10.5 GiB" in target.name
    assert "bf16" in target.hardware.native
    assert target_of().memory_gib is None


def test_memory_takes_the_place_of_the_cards_own():
    target = target_of("T4", 15)
    assert (target.name, target.memory_gib) == ("T4", 15)


@pytest.mark.parametrize("name", ["cpu", "CPU"])
def test_cpu_is_the_processor_of_this_machine(name):
    target = target_of(name)
    assert not target.is_cuda
    assert target.card is None
    assert target_of(name, 4).memory_gib == 4


@pytest.mark.parametrize("memory", [0, -8, math.nan, math.inf, -math.inf, True, "8"])
def test_memory_that_no_card_has_is_refused(memory):
    with pytest.raises(HalfstepError, match=r"memory of .* GiB: a card has a finite amount above 0\. Give 8") as error:
        target_of(None, memory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("RTX 9090", "RTX 4090"), ("RTX 3070 Laptop GPU", "RTX 3070,"), ("mi300", "MI300X"), ("", "RTX 2060 6GB")],
)
def test_a_card_that_the_catalogue_does_not_hold_gets_its_nearest_names(name, nearest):
    with pytest.raises(HalfstepError, match="the catalogue does not hold it") as error:
        target_of(name)
    assert nearest in f"{error.value.fix},"
    assert ("laptop" in str(error.value.why)) == ("Laptop" in name)


def test_a_name_of_several_cards_lists_them():
    with pytest.raises(HalfstepError, match="4 known cards go by this name") as error:
        target_of("A100")
    assert "'A100 SXM4 80GB'" in error.value.fix
