"""Workload, load, stream and what moves a batch: every message, and what the words promise."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from halfstep.errors import HalfstepError
from halfstep.source import load
from halfstep.workload import Workload, num_samples, seed_everything, stream, to_device

GOOD = """
import torch
from torch import nn
import halfstep

def workload(seed, *, width=4):
    return halfstep.Workload(
        model=nn.Linear(width, 1),
        batches=[torch.randn(2, width)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def mean_loss(model, batch):
    return model(batch).mean()


def make(**changes):
    fields = {"model": nn.Linear(4, 1), "batches": [torch.ones(2, 4)], "loss": mean_loss, "optimizer": sgd}
    return Workload(**{**fields, **changes})


def write(folder, text, name="train.py"):
    (folder / name).write_text(text)
    return f"{folder / name}:workload"


# --- fields --------------------------------------------------------------------------------------------------------

FIELD_ERRORS = {
    "model class": ({"model": nn.Linear}, "model=.*it is a class.*Linear"),
    "model function": ({"model": mean_loss}, "model=<function>: it is not a torch.nn.Module"),
    "model frozen": ({"model": nn.Linear(2, 1).requires_grad_(False)}, "nothing trains"),
    "batches tensor": ({"batches": torch.ones(3, 2)}, "batches=.*a Tensor is one batch.*DataLoader"),
    "batches tuple": ({"batches": (torch.ones(100), torch.ones(100))}, "batches=<tuple>: a tuple is one batch"),
    "batches dict": ({"batches": {"x": 1}}, "a dict is one batch.*take it apart"),
    "batches string": ({"batches": "data.bin"}, "batches='data.bin': a str is one batch"),
    "batches data set": ({"batches": TensorDataset(torch.ones(4))}, "single samples.*DataLoader"),
    "batches function": ({"batches": lambda: iter(())}, "batches=<function>: it is a function. Call it"),
    "batches number": ({"batches": 3}, "batches=3: it is not iterable"),
    "loss missing": ({"loss": None}, r"loss=None: it is not a function to call as loss\(model, batch\)"),
    "loss arity": ({"loss": lambda model: 0.0}, r"loss=.*it takes \(model\) and is called as loss\(model, batch\)"),
    "loss module": ({"loss": nn.CrossEntropyLoss()}, "torch's losses take outputs and targets"),
    "loss torch": ({"loss": F.mse_loss}, "torch's losses take outputs and targets"),
    "optimizer built": (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)},
        "optimizer=.*already built.*Write optimizer=lambda parameters",
    ),
    "optimizer name": ({"optimizer": "adamw"}, "optimizer='adamw': it is not a function"),
    "evaluate arity": ({"evaluate": lambda: 0.0}, r"evaluate=.*it takes \(\)"),
    "scheduler class": ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"scheduler=.*step_size.*called as scheduler"),
    "max_norm zero": ({"max_norm": 0}, "max_norm=0: it is not a positive number"),
    "max_norm nan": ({"max_norm": float("nan")}, "max_norm=nan"),
    "max_norm text": ({"max_norm": "1"}, "max_norm='1'"),
    "accumulate zero": ({"accumulate": 0}, "accumulate=0: it counts micro-batches"),
    "accumulate float": ({"accumulate": 2.0}, "accumulate=2.0"),
    "accumulate bool": ({"accumulate": True}, "accumulate=True"),
}


@pytest.mark.parametrize(("changes", "message"), FIELD_ERRORS.values(), ids=FIELD_ERRORS.keys())
def test_a_wrong_field_says_so(changes, message):
    with pytest.raises(HalfstepError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


def test_factories_of_many_kinds_are_taken():
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    workload = make(optimizer=torch.optim.AdamW, scheduler=step, evaluate=lambda model, more=1: 0.0, max_norm=1)
    scheduler = workload.scheduler(workload.optimizer(workload.model.parameters()))
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)


# --- batches -------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(3.0))


class Once:
    """Iterable again and again, but empty from the second time on."""

    def __init__(self):
        self.items = iter([1, 2])

    def __iter__(self):
        yield from self.items


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([torch.tensor(0.0), torch.tensor(1.0)], [0, 1, 0, 1, 0]),
        (DataLoader(torch.arange(3.0), batch_size=None), [0, 1, 2, 0, 1]),
        (DataLoader(Numbers(), batch_size=None), [0, 1, 2, 0, 1]),
        ((torch.tensor(float(i)) for i in itertools.count()), [0, 1, 2, 3, 4]),
    ],
    ids=["list", "DataLoader", "IterableDataset", "generator"],
)
def test_stream_restarts_what_can_start_again(batches, expected):
    assert [batch.item() for batch in itertools.islice(stream(make(batches=batches)), 5)] == expected


@pytest.mark.parametrize("batches", [iter([1, 2]), (i for i in (1, 2)), Once()], ids=["iterator", "generator", "once"])
def test_what_runs_dry_says_after_how_many(batches):
    micro_batches = stream(make(batches=batches))
    assert [next(micro_batches), next(micro_batches)] == [1, 2]
    with pytest.raises(HalfstepError, match=r"ran dry after 2 batches.*DataLoader or a list, or make"):
        next(micro_batches)


@pytest.mark.parametrize("batches", [[], iter([]), DataLoader(torch.ones(3), batch_size=4, drop_last=True)])
def test_empty_batches_have_their_own_message(batches):
    with pytest.raises(HalfstepError, match=r"it is empty.*drop_last"):
        next(stream(make(batches=batches)))


# --- devices and counts --------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True, slots=True)
class Record:
    x: torch.Tensor
    name: str
    length: int = field(init=False, default=3)


class Tokens(dict):
    pass


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, 1),
        lambda x: [x, "text"],
        lambda x: {"x": x},
        lambda x: OrderedDict(x=[x]),
        lambda x: defaultdict(list, x=x),
        lambda x: Tokens(x=x),
        lambda x: Pair(x, None),
        lambda x: Record(x, "a"),
        lambda x: {"deep": (Pair(x, [x]),)},
        lambda x: pack_sequence([x]),
    ],
)
def test_to_device_moves_tensors_and_keeps_types(wrap):
    batch = wrap(torch.ones(3, 2))
    moved = to_device(batch, "meta")  # "meta" stands for a device that is not the CPU

    def kinds(value):
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, dict):
            return type(value), {key: kinds(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value), [kinds(item) for item in value]
        if isinstance(value, Record):
            return Record, kinds(value.x), value.name, value.length
        return value

    assert "cpu" in str(kinds(batch))
    if not isinstance(batch, nn.utils.rnn.PackedSequence):  # which keeps its batch sizes on the CPU
        assert str(kinds(moved)) == str(kinds(batch)).replace("cpu", "meta")


def test_num_samples_is_the_leading_dimension_of_the_first_tensor():
    x = torch.ones(3, 2)
    assert [num_samples(batch) for batch in (x, ("a", x, x[0]), {"x": [x]}, Record(x, "a"))] == [3] * 4
    assert num_samples(torch.tensor(1.0)) == 1
    with pytest.raises(HalfstepError, match="batch of type list: it holds no tensor"):
        num_samples(["text"])


def test_seed_everything_covers_python_numpy_and_torch():
    import numpy

    def draw():
        seed_everything(7)
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    assert draw() == draw()
    for seed in (-1, 2**32, 1.0, True, None):
        with pytest.raises(HalfstepError, match=f"seed {seed}: it is not a whole number from 0"):
            seed_everything(seed)


# --- load ----------------------------------------------------------------------------------------------------------


def test_a_file_loads_with_and_without_a_function_name(tmp_path):
    spec = write(tmp_path, GOOD + "\nDEFAULT_STEPS = 7\n")
    source = load(spec, width=6)
    assert (source.default_steps, source.default_seeds) == (7, None)
    first, again, other = source(0), source(0), load(spec.removesuffix(":workload"), width=6)(1)
    assert first.model is not again.model
    assert torch.equal(first.model.weight, again.model.weight)
    assert torch.equal(first.batches[0], again.batches[0])
    assert not torch.equal(first.model.weight, other.model.weight)


def test_a_file_is_executed_once_a_load_and_can_import_its_neighbours(tmp_path):
    (tmp_path / "halfstep_test_neighbour.py").write_text("COUNT = 0\n")
    (tmp_path / "halfstep_test_late.py").write_text("")
    text = "import halfstep_test_neighbour\nhalfstep_test_neighbour.COUNT += 1\n" + GOOD
    spec = write(tmp_path, text.replace("width=4):", "width=4):\n    import halfstep_test_late"))
    before = list(sys.path)
    source = load(spec)
    source(0), source(1)
    assert sys.modules["halfstep_test_neighbour"].COUNT == 1
    load(spec)
    assert sys.modules["halfstep_test_neighbour"].COUNT == 2
    assert sys.path == before


def test_a_dataclass_under_postponed_annotations_loads(tmp_path):
    head = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Batch:\n    x: int\n"
    assert load(write(tmp_path, head + GOOD))(0).accumulate == 1


FILE_ERRORS = {
    "import": ("\nimport halfstep_no_such_module\n", r"train.py line 2: ModuleNotFoundError: No module named 'half"),
    "syntax": ("def workload(seed)\n", "train.py line 1: SyntaxError: expected ':'"),
    "raises": ("x = 1\ny = x / 0\n", "train.py line 2: ZeroDivisionError: division by zero. Correct that line."),
    "exits": ("import sys\nsys.exit(3)\n", "train.py line 2: SystemExit: 3"),
    "own error": ("import halfstep\nraise halfstep.HalfstepError('mine', 'no', 'Yes.')\n", "^mine: no. Yes.$"),
    "typo": ("def workloads(seed): ...\n", r"no function 'workload' \(did you mean workloads\?\); its functions are w"),
    "none": ("from os.path import join\n", "it defines no function at all"),
    "not function": ("workload = 3\n", "workload is of type int, not a function.*Write def workload"),
    "no seed": ("def workload(): ...\n", r"it takes \(\) and is called with the seed alone"),
    "two": ("def workload(seed, size): ...\n", r"it takes \(seed, size\) and is called with the seed alone"),
    "steps": ("DEFAULT_STEPS = 0\ndef workload(seed): ...\n", "DEFAULT_STEPS = 0: it is not a count"),
}


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS.values(), ids=FILE_ERRORS.keys())
def test_a_file_that_cannot_work_says_so(tmp_path, text, message):
    before = list(sys.path)
    with pytest.raises(HalfstepError, match=message) as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert sys.path == before


def test_an_error_in_a_neighbour_names_the_neighbour(tmp_path):
    (tmp_path / "halfstep_test_broken.py").write_text("\n\nvalue = missing\n")
    with pytest.raises(HalfstepError, match=r"halfstep_test_broken.py line 3: NameError"):
        load(write(tmp_path, "import halfstep_test_broken\n"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", r"it returned None. End it with return halfstep.Workload\("),
        ("return {}", "it returned a value of type dict"),
        ("return missing", "train.py line 2: NameError: name 'missing' is not defined"),
    ],
)
def test_a_function_that_cannot_work_says_so(tmp_path, body, message):
    source = load(write(tmp_path, f"def workload(seed):\n    {body}\n"))
    with pytest.raises(HalfstepError, match=message):
        source(0)


def test_a_missing_file_or_name_suggests_the_closest(tmp_path, monkeypatch):
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HalfstepError, match=r"trian.py: there is no such file \(did you mean train.py\?\)\. "):
        load("trian.py:workload")
    with pytest.raises(HalfstepError, match="there is no directory nowhere"):
        load("nowhere/train.py")
    with pytest.raises(HalfstepError, match=r"'charml': .*\(did you mean charlm\?\).*charlm, digits, mlp, fragile"):
        load("charml")
    with pytest.raises(HalfstepError, match=r"'train.txt:workload'.*not a \.py file"):
        load("train.txt:workload")


def test_unknown_options_say_which_exist(tmp_path):
    spec = write(tmp_path, GOOD)
    with pytest.raises(HalfstepError, match=r"with option widht: .*\(did you mean width\?\). Its options are width"):
        load(spec, widht=3)
    with pytest.raises(HalfstepError, match=r"mlp with option width: .*It has no options"):
        load("mlp", width=3)
    with pytest.raises(HalfstepError, match="option seed"):
        load(spec, seed=3)


def test_the_code_in_the_documentation_runs():
    page = (Path(__file__).parent.parent / "docs" / "workload.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        if callable(names["workload"]):
            names["workload"] = names["workload"](0)
        assert isinstance(names["workload"], Workload)
