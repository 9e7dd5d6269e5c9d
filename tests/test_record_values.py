"""What a recorder says of a tensor, against one Python float after the other; and which tensors it takes for one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from reference.values import plain_values
from torch import nn

from halfstep.formats import FORMATS, format_of
from halfstep.record import rows
from halfstep.record.rows import PIECE, SMALL, Rows, measure, rows_on_cpu, rows_without_read
from halfstep.record.values import Measurements, Values, format_name, is_measurable

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def random():
    return torch.Generator().manual_seed(3)


def patterns(dtype):
    """Every number of a format of one or two bytes."""
    if dtype in FP8:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def bits(*numbers):
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_bits(size):
    return torch.randint(-(2**31), 2**31, (size,), generator=random()).to(torch.int32).view(torch.float32)


def tensors():
    """Names and tensors: every kind of value, format and layout."""
    normal = torch.randn(4, 6, generator=random())
    yield "every bf16", patterns(torch.bfloat16)
    yield "every fp16", patterns(torch.float16)
    for dtype in FP8:
        yield str(dtype), patterns(dtype)
    yield "random bits", random_bits(5000)
    yield "subnormals", bits(1, 2, 0x007FFFFF, 0x00800000, 0x80000001, 0x807FFFFF)
    yield "the largest subnormal and zero", bits(0, 0x007FFFFF, 0x00800000, 0x80000000)
    yield "payloads", bits(0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7FFFFFFF)
    yield "infinities", torch.tensor([math.inf, -math.inf, -math.inf, 1.0])
    yield "only NaN", torch.full((3,), math.nan)
    yield "only inf", torch.full((3,), -math.inf)
    yield "zeros", torch.tensor([0.0, -0.0, 0.0])
    yield "negative zero and a subnormal", bits(0x80000000, 0x80000001)
    yield "negative", -normal.abs()
    yield "ends", torch.tensor([FORMATS["fp32"].max, -FORMATS["fp32"].tiny])
    wide = [
        1e300,
        -1e300,
        1e-300,
        -1e-300,
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1 / 3,
        2 - 2**-40,
        2**-149,
        2**-150,
    ]
    yield "fp64", torch.tensor(wide, dtype=torch.float64)
    yield "empty", torch.empty(0, 3)
    yield "0-dim", torch.tensor(-2.5)
    yield "0-dim fp16", torch.tensor(2.0**-24, dtype=torch.float16)
    yield "transposed", normal.t()
    yield "permuted", torch.randn(2, 3, 4, generator=random()).permute(2, 0, 1)
    yield "strided", normal[:, ::2]
    yield "expanded", torch.tensor([[1.5], [0.0]]).expand(2, 5)
    yield "overlapping", torch.arange(6.0).as_strided((3, 3), (1, 1))
    yield "offset", normal[2:]
    yield "complex", torch.complex(normal, normal.t().reshape(4, 6) * 0)
    yield "conjugated", torch.tensor([complex(1.0, math.inf), 2j]).conj()
    yield "negated", torch.tensor([complex(1.0, math.inf), 2j]).conj().imag
    yield "needs a gradient", (normal.clone().requires_grad_() * 2)
    with torch.inference_mode():
        yield "inference", normal * 3


TENSORS = dict(tensors())


def flat(tensor):
    return torch.cat([piece.float() for piece in rows._pieces(tensor.detach())])


def by_one(tensor):
    return measure(tensor.detach())


def by_many(tensor):
    """Among others, as small tensors are."""
    before, after = torch.tensor([7.0, 0.0, math.inf]), torch.tensor([math.nan, 1e-40])
    values = flat(tensor)
    found = torch.from_numpy(rows_on_cpu(torch.cat([before, values, after]).numpy(), [3, len(values), 2]))
    assert torch.equal(found[0], measure(before))
    assert torch.equal(found[2], measure(after))
    return found[1]


def without_read(tensor):
    values = flat(tensor)
    return rows_without_read(values, [len(values)])[0]


def many_without_read(tensor):
    before, after = torch.tensor([7.0, 0.0, math.inf]), torch.tensor([math.nan, 1e-40])
    values = flat(tensor)
    return rows_without_read(torch.cat([before, values, after]), [3, len(values), 2])[1]


def by_recorder(tensor):
    kept = Rows()
    kept.add(torch.ones(3))
    number = kept.add(tensor)
    return torch.tensor(kept.read()[number])


def says(tensor, row):
    values = Values(format_name(tensor.dtype), tuple(tensor.shape), None, tuple(row.tolist()))
    assert values.size == sum(values.row[:256])
    return {name: getattr(values, name) for name in plain_values(torch.zeros(1))}


@pytest.mark.parametrize("way", [by_one, by_many, without_read, many_without_read, by_recorder])
@pytest.mark.parametrize("name", TENSORS)
def test_every_count_is_that_of_the_twin(name, way):
    tensor = TENSORS[name]
    if not tensor.numel() and way not in (by_one, by_recorder):
        pytest.skip("tensors without values go the first way")
    assert says(tensor, way(tensor)) == plain_values(tensor)


@pytest.mark.parametrize("name", ["every fp16", "every bf16"])
def test_sixteen_bit_is_taken_without_a_read_as_it_is(name):
    tensor = TENSORS[name]
    assert torch.equal(rows_without_read(tensor, [2**16])[0], measure(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_of_several_pieces_is_the_sum_of_them(dtype):
    size = 2 * PIECE + 77
    tensor = random_bits(size).to(dtype)
    tensor[PIECE + 5] = 0.0
    whole, parts = measure(tensor), torch.stack([measure(part) for part in tensor.split(30_011)])
    assert torch.equal(whole[:-2], parts[:, :-2].sum(0))
    assert (whole[-2], whole[-1]) == (parts[:, -2].max(), parts[:, -1].min())
    pieces = torch.cat([rows_without_read(part, [len(part)]) for part in tensor.split(50_021)])
    assert torch.equal(whole[:-2], pieces[:, :-2].sum(0))


@pytest.mark.parametrize("special", [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 3e38])
def test_a_value_that_comes_once_in_a_large_tensor_counts(special):
    tensor = torch.randn(PIECE + 1000, generator=random())
    tensor[PIECE + 300] = special
    found = says(tensor, measure(tensor))
    assert found == plain_values(tensor)


def test_a_transposed_tensor_is_counted_where_it_lies(monkeypatch):
    """Counting it must not copy it: its pieces are views."""
    tensor = torch.randn(300, 400, generator=random()).t()
    storage = tensor.untyped_storage().data_ptr()
    assert all(piece.untyped_storage().data_ptr() == storage for piece in rows._pieces(tensor))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS)
def test_a_gpu_counts_as_a_cpu(name):
    tensor = TENSORS[name].detach()
    kept = Rows()
    small = [kept.add(part) for part in (tensor.cuda(), torch.ones(3, device="cuda"), tensor.cuda())]
    found = kept.read()
    assert found[small[0]] == found[small[2]] == tuple(measure(tensor).tolist())
    assert measure(tensor.cuda()).tolist() == measure(tensor).tolist()


@pytest.mark.gpu
def test_counting_on_a_gpu_does_not_wait_for_it():
    tensors = [torch.randn(size, device="cuda") for size in (10, 1000, SMALL, 3 * PIECE)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = Rows()
        for tensor in tensors * 20:
            kept.add(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(kept.read()) == 80


# --- what the counts say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e4m3", "e5m2"])
def test_subnormal_is_what_is_below_the_smallest_normal_number_of_the_format(name):
    format = FORMATS[name]
    tensor = random_bits(4000) if name == "fp32" else patterns(format.dtype)
    values = Values(name, tuple(tensor.shape), None, tuple(measure(tensor).tolist()))
    expected = sum(0 < abs(value) < format.tiny for value in tensor.double().flatten().tolist())
    assert values.num_subnormal == expected > 0
    assert format_of(tensor.dtype).name == values.format == format_name(tensor.dtype)


def test_of_no_values_nothing_is_said():
    values = Values("fp32", (0, 3), None, tuple(measure(torch.empty(0, 3)).tolist()))
    assert (values.size, values.exponents, values.largest, values.smallest, values.kind) == (0, {}, 0.0, None, None)


@pytest.mark.parametrize(("special", "kind"), [((), None), ((math.inf,), "inf"), ((-math.inf, math.nan), "nan")])
def test_the_kind_of_a_fault(special, kind):
    tensor = torch.tensor([1.0, *special])
    assert Values("fp32", tuple(tensor.shape), None, tuple(measure(tensor).tolist())).kind == kind


# --- when a value is counted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, SMALL, PIECE + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_what_counts_is_what_a_tensor_held_when_it_was_added(size, dtype):
    kept, tensor = Rows(), torch.full((size,), 2.0, dtype=dtype)
    before = kept.add(tensor)
    tensor.fill_(math.nan)
    after = kept.add(tensor)
    found = kept.read()
    assert (found[before][128], found[after][255]) == (size, size)


def test_what_waits_is_bounded():
    kept = Rows()
    for _ in range(100):
        kept.add(torch.ones(SMALL - 1))
        assert kept._num_waiting <= rows.ROOM
        assert sum(len(copy) for _, copy in itertools.chain(*kept._waiting.values())) == kept._num_waiting
    assert all(row[127] == SMALL - 1 for row in kept.read())


def test_many_tiny_tensors_are_counted_in_several_goes():
    kept, tensors = Rows(), list(random_bits(3 * 2 * rows.MOST + 30).split(3))
    numbers = [kept.add(tensor) for tensor in tensors]
    found = kept.read()
    assert [torch.tensor(found[number]).tolist() for number in numbers] == [measure(t).tolist() for t in tensors]


def test_reading_twice_and_going_on_between():
    kept = Rows()
    assert kept.read() == []
    kept.add(torch.ones(2))
    first = kept.read()
    kept.add(torch.ones(SMALL))
    kept.add(torch.zeros(1))
    assert kept.read()[0] == first[0]
    assert [row[127] for row in kept.read()] == [2, SMALL, 0]


# --- which tensor is which -----------------------------------------------------------------------------------------


def measurements(model=None):
    return Measurements(model or nn.Module())


def test_a_tensor_is_measured_once_and_again_after_a_change():
    kept, tensor = measurements(), torch.ones(4)
    first = kept.of(tensor)
    assert kept.of(tensor) == kept.of(tensor.detach()) == first
    tensor.add_(1)
    second = kept.of(tensor)
    assert second != first
    values = kept.read()
    assert (values[first].largest, values[second].largest) == (1.0, 2.0)


def test_a_write_that_no_version_counts_is_told_to_it():
    kept, tensor = measurements(), torch.ones(4)
    first = kept.of(tensor)
    tensor.data.mul_(3)  # has a version of its own
    kept.written(tensor.data)
    second = kept.of(tensor)
    assert [kept.read()[number].largest for number in (first, second)] == [1.0, 3.0]


def test_what_an_operation_changed_is_found_under_its_next_version():
    kept, tensor = measurements(), torch.ones(4)
    kept.of(tensor)
    tensor.data.fill_(5.0)  # as below autograd: the version rises afterwards
    kept.written(tensor)
    number = kept.changed(tensor)
    tensor.data.fill_(9.0)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))
    assert kept.of(tensor) == number
    assert kept.read()[number].largest == 5.0


def test_views_of_the_same_values_share_a_row_and_others_do_not():
    kept, tensor = measurements(), torch.arange(12.0).view(3, 4)
    whole, turned, flat = kept.of(tensor), kept.of(tensor.t()), kept.of(tensor.view(-1))
    part, strided, twice = kept.of(tensor[1:]), kept.of(tensor[:, :2]), kept.of(tensor[:1].expand(3, 4))
    values = kept.read()
    assert values[whole].row is values[turned].row is values[flat].row
    assert [values[n].shape for n in (whole, turned, flat)] == [(3, 4), (4, 3), (12,)]
    assert len({id(values[n].row) for n in (whole, part, strided, twice)}) == 4
    assert [values[n].largest for n in (part, strided, twice)] == [11.0, 9.0, 3.0]
    one = kept.of(tensor.as_strided((4, 1, 3), (1, 99, 4)))  # the stride of a single row leads nowhere
    assert kept.read()[one].row == kept.read()[whole].row
    assert kept._tensors[one][-1] == kept._tensors[whole][-1]


def test_a_number_read_in_another_format_is_another_tensor():
    kept, tensor = measurements(), torch.ones(4)
    plain, low = kept.of(tensor), kept.of(tensor.view(torch.bfloat16))
    values = kept.read()
    assert (values[plain].format, values[low].format) == ("fp32", "bf16")
    assert values[low].num_zeros == 4  # half of each number


def test_a_conjugate_is_not_its_original():
    tensor = torch.tensor([complex(1.0, math.inf)])
    kept = measurements()
    numbers = [kept.of(t) for t in (tensor, tensor.conj(), tensor.imag, tensor.conj().imag)]
    assert [kept.read()[n].num_negative_inf for n in numbers] == [0, 1, 0, 1]


def test_memory_that_was_freed_is_never_taken_for_what_lay_there():
    kept = measurements()
    for value in range(200):
        number = kept.of(torch.full((64,), float(value + 1)))  # freed at once, so that the next one gets its memory
        assert number == value
    assert [values.largest for values in kept.read()] == [float(value + 1) for value in range(200)]


def test_names_are_those_of_parameters_and_buffers_and_of_parts_of_them():
    model = nn.BatchNorm1d(4)
    together = torch.zeros(6)  # as a flattened recurrent layer has it
    model.register_buffer("low", together[:2])
    model.register_buffer("high", together[2:])
    kept = measurements(model)
    numbers = [kept.of(t) for t in (model.weight, model.running_var, model.bias[1:3], together[4:], torch.ones(4))]
    assert [kept.read()[n].name for n in numbers] == ["weight", "running_var", "bias", "high", None]


class Sub(torch.Tensor):
    pass


def test_what_has_no_values_in_memory_is_left_alone():
    sparse = torch.eye(3).to_sparse()
    others = [torch.arange(3), torch.ones(3, device="meta"), sparse, torch.ones(2).as_subclass(Sub), 1.5, None]
    assert not any(is_measurable(value) for value in others)
    assert is_measurable(nn.Parameter(torch.ones(1)))
