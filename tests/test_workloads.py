"""The built-in workloads: to the bit from a seed, they learn in fp32, and each breaks only where it should."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import math

import pytest
import torch
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.source import load
from halfstep.workload import stream, to_device
from halfstep.workloads import BUILT_IN

TINY = {"charlm": {"width": 32, "depth": 1, "context": 32, "batch_size": 8}}

# Steps, and the share of the first held-out loss that fp32 must get under with the default sizes. The charlm of chance
# is ln 256 = 5.5 nats a byte and knowing how often each byte occurs is 3.2; the others start near ln(classes).
LEARNS = {"charlm": (60, 0.55), "digits": (46, 0.15), "mlp": (100, 0.4), "fragile": (100, 0.3)}


def train(source, seed, num_steps, device="cpu", context=contextlib.nullcontext):
    """A plain loop. Returns the micro-batch losses, and the held-out loss before and after."""
    workload = source(seed)
    model = workload.model.to(device)
    optimizer = workload.optimizer(model.parameters())
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    before, losses = float(workload.evaluate(model)), []
    for batch in itertools.islice(stream(workload), num_steps):
        with context():
            value = workload.loss(model, to_device(batch, device))
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        if workload.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), workload.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(value.item())
    return losses, before, float(workload.evaluate(model))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_seed_gives_the_same_losses_to_the_bit(name):
    source = load(name, **TINY.get(name, {}))
    first, again, other = (train(source, seed, 5) for seed in (3, 3, 4))
    assert first == again
    assert first[0] != other[0]


@pytest.mark.parametrize("name", BUILT_IN)
def test_fp32_learns(name):
    num_steps, share = LEARNS[name]
    source = load(name)
    assert source.default_steps >= num_steps
    assert source.default_seeds >= 3
    _, before, after = train(source, 0, num_steps)
    assert after < share * before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", BUILT_IN)
def test_fp32_learns_on_cuda(name):
    num_steps, share = LEARNS[name]
    _, before, after = train(load(name), 0, num_steps, device="cuda")
    assert after < share * before


@pytest.mark.parametrize("name", BUILT_IN)
def test_evaluate_changes_nothing(name):
    workload = load(name, **TINY.get(name, {}))(0)
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    value = workload.evaluate(workload.model)
    assert not value.requires_grad
    assert float(value) == float(workload.evaluate(workload.model))
    assert workload.model.training
    assert all(torch.equal(before[key], value) for key, value in workload.model.state_dict().items())


# --- charlm --------------------------------------------------------------------------------------------------------


def test_charlm_trains_on_the_bytes_of_any_file(tmp_path):
    file = tmp_path / "noise.bin"
    file.write_bytes(bytes(range(256)) * 16)
    _, before, after = train(load("charlm", data=file, **TINY["charlm"]), 0, 60)
    assert abs(before - math.log(256)) < 0.2  # an untrained model knows nothing
    assert after < 0.7 * before


def test_charlm_never_trains_on_the_held_out_text(tmp_path):
    file = tmp_path / "halves.bin"
    file.write_bytes(b"a" * 9000 + b"b" * 1000)
    workload = load("charlm", data=str(file), **TINY["charlm"])(0)
    assert all((batch == ord("a")).all() for batch in itertools.islice(stream(workload), 50))


def test_charlm_says_what_is_wrong_with_its_data(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(HalfstepError, match=r"charlm with data='.*absent.txt': it cannot be read \(No such file"):
        load("charlm", data=tmp_path / "absent.txt")(0)
    with pytest.raises(HalfstepError, match=r"cannot be read \(Is a directory\)"):
        load("charlm", data=tmp_path)(0)
    with pytest.raises(HalfstepError, match=r"short.txt: 9 bytes are too few for a context of 64, which needs 1300"):
        load("charlm", data=tmp_path / "short.txt")(0)


def test_charlm_says_what_is_wrong_with_its_sizes():
    with pytest.raises(HalfstepError, match=r"width=70: it is not a multiple of the head width 32. Use 96"):
        load("charlm", width=70)(0)
    with pytest.raises(HalfstepError, match="depth=0: it is not a count"):
        load("charlm", depth=0)(0)


# --- digits --------------------------------------------------------------------------------------------------------


def test_digits_without_scikit_learn_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(HalfstepError, match=r"scikit-learn, which is missing. pip install 'halfstep\[torch\]'"):
        load("digits")(0)


# --- fragile -------------------------------------------------------------------------------------------------------
# torch's own autocast on the CPU keeps products in 16 bit as CUDA's does, and norm too. That makes the test stricter:
# pool must still be the one to fail.


def outputs(name):
    """The modules of fragile in the order they ran under autocast to ``name``, each with whether it was finite."""
    workload = load("fragile")(0)
    finite = {}
    for key, module in workload.model.named_children():
        module.register_forward_hook(lambda _, inputs, out, key=key: finite.update({key: bool(out.isfinite().all())}))
    with torch.autocast("cpu", dtype=getattr(torch, name), enabled=name != "float32"):
        loss = workload.loss(workload.model, next(stream(workload)))
    return finite, loss


def test_fragile_overflows_in_fp16_in_pool_and_nowhere_before():
    finite, loss = outputs("float16")
    assert finite == {"features": True, "pool": False, "norm": False, "head": False}
    assert not loss.isfinite()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_fragile_is_finite_in_fp32_and_bf16(name):
    finite, loss = outputs(name)
    assert all(finite.values())
    assert abs(loss.item() - math.log(8)) < 1  # eight classes, untrained


def keep_in_fp32(module):
    forward = module.forward

    def in_fp32(x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    module.forward = in_fp32


@pytest.mark.parametrize("seed", range(5))
def test_fragile_is_mended_by_keeping_pool_in_fp32(seed):
    workload = load("fragile")(seed)
    keep_in_fp32(workload.model.pool)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = workload.loss(workload.model, next(stream(workload)))
    (loss * 2.0**12).backward()  # with a loss scale that leaves fp16 room
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())


def test_fragile_still_overflows_once_it_has_learned_in_fp32():
    workload = load("fragile")(0)
    optimizer = workload.optimizer(workload.model.parameters())
    batches = stream(workload)
    for batch in itertools.islice(batches, 100):
        workload.loss(workload.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for batch in itertools.islice(batches, 3):
        with torch.autocast("cpu", dtype=torch.float16):
            assert not workload.loss(workload.model, batch).isfinite()
