"""Digests against plain Python, and the one collective that compares them."""

import random

import pytest
import torch

from halfstep.ranks.difference import Difference, first_difference, name_ranks, say, with_article
from halfstep.ranks.digests import differing, digest_of, fold, sum_of_bits
from halfstep.ranks.one import Ranks

MODULO = 1 << 64
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64),
    *(torch.int8, torch.uint8, torch.int32, torch.bool),
]


def signed(number):
    return (number + MODULO // 2) % MODULO - MODULO // 2


def plain_sum(tensor):
    """The bytes of the elements in order, as little-endian 64-bit numbers; what is left, as numbers of their width."""
    elements = [element.contiguous().reshape(1).view(torch.uint8).tolist() for element in tensor.flatten()]
    width = tensor.element_size()
    data = bytes(byte for element in elements for byte in element)
    num_words = len(data) // 8
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, num_words * 8, 8)]
    left = data[num_words * 8 :]
    words += [int.from_bytes(left[i : i + width], "little", signed=True) for i in range(0, len(left), width)]
    return signed(sum(words))


def drawn(dtype, num):
    """Any bits at all, NaN among them."""
    if dtype == torch.bool:
        return torch.randint(2, (num,)).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(256, (num * size,), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 4, 7, 8, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_bits_is_that_of_the_words(dtype, num):
    tensor = drawn(dtype, num + 1)
    for each in (
        tensor[:num],
        tensor[1:],
        tensor[::2],
        tensor[:num].expand(3, num),
        tensor[: num // 2 * 2].view(-1, 2).t(),
    ):
        assert sum_of_bits(each).item() == plain_sum(each)


def test_a_parameter_without_a_dimension_has_bits_too():
    assert sum_of_bits(torch.tensor(1.0)).item() == 0x3F800000


def test_any_single_bit_changes_the_sum():
    tensor = torch.randn(5)
    before = sum_of_bits(tensor).item()
    for element in range(5):
        for bit in range(32):
            mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            tensor.view(torch.int32)[element].bitwise_xor_(mask)
            assert sum_of_bits(tensor).item() != before, (element, bit)
            tensor.view(torch.int32)[element].bitwise_xor_(mask)
    assert sum_of_bits(tensor).item() == before


def test_the_fold_is_a_sum_with_odd_factors_and_sees_a_change_of_any():
    generator = random.Random(0)
    numbers = [generator.randrange(-MODULO // 2, MODULO // 2) for _ in range(9)]
    folded = lambda of: fold([torch.tensor(number) for number in of]).item()  # noqa: E731
    assert folded(numbers) == signed(sum(number * (2 * place + 1) for place, number in enumerate(numbers)))
    for place in range(9):
        for bit in range(64):
            changed = [signed(n ^ 1 << bit) if place == i else n for i, n in enumerate(numbers)]
            assert folded(changed) != folded(numbers)


def test_a_quantised_tensor_counts_with_all_its_parts():
    class Quantised:
        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

    codes, scale = torch.arange(16, dtype=torch.uint8), torch.ones(2)
    first = sum_of_bits(Quantised(codes, scale)).item()
    assert first == sum_of_bits(Quantised(codes.clone(), scale.clone())).item()
    assert first != sum_of_bits(Quantised(codes, scale * 2)).item()
    assert first != sum_of_bits(Quantised(codes + 1, scale)).item()


def test_the_digest_of_words_does_not_know_their_order_but_who_says_what():
    words = {"computes": "in bf16", "steps": "with AdamW"}
    assert digest_of(words) == digest_of(dict(reversed(words.items())))
    others = [{}, {"computes": "in bf16"}, {"computes": "with AdamW", "steps": "in bf16"}, {**words, "a": ""}]
    assert len({digest_of(each) for each in [words, *others]}) == 5
    assert all(-MODULO // 2 <= digest_of(each) < MODULO // 2 for each in others)


EDGES = [0, 1, -1, 1 << 31, 1 << 32, (1 << 32) - 1, -(1 << 32), MODULO // 2 - 1, -MODULO // 2, 1 << 62]


def compared():
    rank = torch.distributed.get_rank()
    ranks = group()
    same = differing(ranks, EDGES)
    pairs = [(a, b) for a in EDGES for b in EDGES]
    on_host = differing(ranks, [pair[rank] for pair in pairs])
    on_device = differing(ranks, [torch.tensor(pair[rank]) for pair in pairs])
    absent = differing(ranks, [5 if rank else None, torch.tensor(6) if not rank else None, 7, rank, -1])
    return same, on_host == on_device == [a != b for a, b in pairs], absent


def group():
    from halfstep.ranks.group import Group

    return Group(torch.nn.Linear(1, 1), torch.distributed.group.WORLD)


def test_ranks_find_what_differs_in_one_collective(world2):
    """The extremes of 64 bits among them; what one rank alone has no say in differs from nothing."""
    for same, is_right, absent in world2.run(compared):
        assert same == [False] * len(EDGES)
        assert is_right
        assert absent == [False, False, False, True, False]


def test_one_process_differs_from_nobody():
    assert differing(Ranks(torch.nn.Linear(1, 1)), [1, torch.tensor(2)]) == [False] * 2


# --- in words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([1, 0, 2], "ranks 0-2"), ([0, 2], "ranks 0, 2"), ([5, 0, 1, 7, 6], "ranks 0-1, 5-7")],
)
def test_ranks_are_named_in_runs(numbers, text):
    assert name_ranks(numbers) == text


def test_the_first_difference_is_told_and_how_many_follow():
    here, there = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "1", "d": "4"}
    assert first_difference(here, there) == Difference("b", "2", "1", 2)
    assert first_difference({}, there) == Difference("a", "not at all", "1", 2)
    assert first_difference(there, {}) == Difference("a", "1", "not at all", 2)


def test_a_sentence_for_each_thing_and_three_at_most():
    lr = {3: Difference("sets lr", "to 1", "to 0"), 4: Difference("sets lr", "to 1", "to 0")}
    assert say(lr, [0, 1, 2]) == "ranks 3-4 set lr to 1, ranks 0-2 to 0"
    lr[5] = Difference("sets lr", "to 2", "to 0")
    assert say(lr, [0, 1]) == "ranks 3-4 set lr to 1, rank 5 to 2, ranks 0-1 to 0"
    many = {rank: Difference(f"has {rank}", "a", "b", 2) for rank in range(1, 6)}
    assert say({1: many[1], 2: many[2]}, [0]) == (
        "rank 1 has 1 a, rank 0 b (and 2 more like it); rank 2 has 2 a, rank 0 b (and 2 more like it)"
    )
    assert say(many, [0]).endswith("; 2 more")
    assert say(dict.fromkeys((1, 2), Difference("is", "at 1", "at 2")), [0]) == "ranks 1-2 are at 1, rank 0 at 2"


def test_cards_have_an_article():
    assert [with_article(n) for n in ("Tesla V100", "NVIDIA A100", "AMD Instinct MI300X")] == [
        "a Tesla V100",
        "an NVIDIA A100",
        "an AMD Instinct MI300X",
    ]
