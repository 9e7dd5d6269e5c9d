"""A checkpoint is whole or not there, and what cannot be loaded is refused before anything is changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from reference.loop import assert_same
from reference.resumed import build, everything, micro_batches, run
from torch import nn

from halfstep import HalfstepError, Stepper
from halfstep.distributed import load, save

pytestmark = pytest.mark.usefixtures("kernels_stay")
BF16, FP16 = "bf16", "fp16 scale.init=256"


def trained(policy=BF16, num=2, **settings):
    """A run in one process, in mid-window where ``num`` is odd."""
    stepper = build("one", policy, **settings)
    run(stepper, micro_batches("one", 0, num))
    return stepper


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# --- which checkpoints there are -------------------------------------------------------------------------------------


def test_nothing_was_saved_yet(tmp_path):
    stepper = trained()
    before = everything(stepper)
    (tmp_path / "empty").mkdir()
    (tmp_path / "crashed" / ".step-00000001.part").mkdir(parents=True)
    for folder in ("missing", "empty", "crashed"):
        assert load(tmp_path / folder, stepper) is None
    assert_same(everything(stepper), before)


def test_the_latest_is_loaded_and_older_ones_go(tmp_path):
    stepper = trained(num=0)
    for number in range(5):
        run(stepper, micro_batches("one", number, number + 1))
        path = save(tmp_path, stepper, extra=number)
        assert path.is_dir()
        assert path.parent == tmp_path
    assert names(tmp_path) == ["step-00000002", "step-00000002-micro-4"]
    assert load(tmp_path, trained()) == 4
    assert load(tmp_path / "step-00000002", trained()) == 3


def test_how_many_stay(tmp_path):
    stepper = trained(num=0)
    for number in range(4):
        run(stepper, micro_batches("one", number, number + 1))
        save(tmp_path, stepper, keep=None)
    assert len(names(tmp_path)) == 4
    save(tmp_path, stepper, keep=1)
    assert names(tmp_path) == ["step-00000002-again-1"]
    with pytest.raises(HalfstepError, match=r"keep=0: .* Use 1, 2, 3"):
        save(tmp_path, stepper, keep=0)


def test_the_same_position_is_saved_again(tmp_path):
    """The one before stays until the new one is whole."""
    stepper = trained()
    for again in range(3):
        save(tmp_path, stepper, extra=again)
    assert names(tmp_path) == ["step-00000001-again-2"]
    assert load(tmp_path, trained()) == 2


def test_a_run_that_has_not_come_so_far_does_not_hide_behind_a_later_one(tmp_path):
    save(tmp_path, trained(num=4))
    with pytest.raises(HalfstepError, match=r"step 1 in .* it holds step-00000002 already.*Load that one first"):
        save(tmp_path, trained(num=2))
    assert names(tmp_path) == ["step-00000002"]


def test_what_a_dead_writer_left_is_no_checkpoint_and_goes(tmp_path):
    save(tmp_path, trained(), extra="whole")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000009.part")
    (tmp_path / "step-00000008").mkdir()  # no manifest
    assert load(tmp_path, trained()) == "whole"
    save(tmp_path, trained(num=4))
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000008"]


def test_what_a_checkpoint_says_of_itself(tmp_path):
    stepper = trained("bf16 master=split16")
    manifest = json.loads((save(tmp_path, stepper) / "checkpoint.json").read_text())
    assert manifest["files"].keys() == {".metadata", "__0_0_0.distcp"}
    del manifest["files"], manifest["halfstep"], manifest["torch"]
    assert manifest == {
        "format": 1,
        "step": 1,
        "policy": "bf16 master=split16",
        "optimizer": "torch.AdamW",
        "engine": "one process",
        "num_ranks": 1,
        "is_cut": False,
    }


# --- refused, and nothing changed ------------------------------------------------------------------------------------


class Other(nn.Module):
    """As ``Net``, with what the arguments change."""

    def __init__(self, width=13, dtype=None, table=True):
        super().__init__()
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, 5)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)
        if table:
            self.register_buffer("table", torch.arange(5.0, dtype=dtype))

    def forward(self, x):
        return self.head(self.drop(self.norm(self.body(x))))


def other(model, optimizer=torch.optim.AdamW, groups=None, scheduler=torch.optim.lr_scheduler.LinearLR, policy=BF16):
    made = optimizer(groups(model) if groups else model.parameters(), lr=0.01)
    return Stepper(model, made, policy, watch=False, accumulate=2, scheduler=scheduler and scheduler(made))


def two_groups(model):
    return [{"params": [*model.body.parameters()]}, {"params": [*model.head.parameters(), *model.norm.parameters()]}]


REFUSED = {
    "another shape": (lambda: other(Other(12)), r"another model, by its parameter body.weight of shape \(13, 8\)"),
    "more": (
        lambda: other(nn.Sequential(Other())),
        "its parameter body.bias, body.weight, head.bias and 3 more",
    ),
    "a buffer": (lambda: other(Other(table=False)), "by its buffer table: this model has none"),
    "a format": (lambda: other(Other(dtype=torch.float64)), "buffer table, saved in float32: .* in float64"),
    "fp64": (lambda: other(Other().double()), "parameter body.weight, saved in float32: .* in float64"),
    "an optimizer": (lambda: other(Other(), torch.optim.Adam), "optimizer torch.AdamW: this run has torch.Adam"),
    "groups": (lambda: other(Other(), groups=two_groups), "with 1 parameter groups: group 0 of the 2 here"),
    "no scheduler": (lambda: other(Other(), scheduler=None), "torch.LinearLR: this run's stepper has no scheduler"),
    "a scheduler": (
        lambda: other(Other(), scheduler=torch.optim.lr_scheduler.ConstantLR),
        "torch.LinearLR: this run's stepper has torch.ConstantLR",
    ),
    "a scale": (lambda: trained(FP16), "the state of a none loss scale: this run has scale=dynamic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_run_is_refused(name, tmp_path):
    make, message = REFUSED[name]
    save(tmp_path, trained())
    stepper = make()
    before = everything_of(stepper)
    with pytest.raises(HalfstepError, match=message) as error:
        load(tmp_path, stepper)
    assert "\n" not in str(error.value)
    assert_same(everything_of(stepper), before)


def everything_of(stepper):
    numbers = torch.get_rng_state()
    return [dict(stepper.model.state_dict()), stepper.optimizer.state_dict(), stepper.state_dict(), numbers]


def test_a_promotion_of_a_module_that_is_not_there(tmp_path):
    stepper = trained(FP16)
    stepper._promoted.append("nowhere")
    save(tmp_path, stepper)
    with pytest.raises(HalfstepError, match="a promotion of module 'nowhere': this model has no such module"):
        load(tmp_path, trained(FP16))


def cut_short(path):
    os.truncate(path / "__0_0_0.distcp", 99)


def remove_file(path):
    (path / "__0_0_0.distcp").unlink()


def spoil_manifest(path):
    (path / "checkpoint.json").write_text('{"format": ')


def write_newer(path):
    manifest = json.loads((path / "checkpoint.json").read_text()) | {"format": 2, "halfstep": "9.0"}
    (path / "checkpoint.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_short, "its file __0_0_0.distcp has 99 bytes instead of"),
        (remove_file, "its file __0_0_0.distcp is missing"),
        (spoil_manifest, r"its checkpoint.json cannot be read \(JSONDecodeError\)"),
        (write_newer, "in format 2: this halfstep reads up to format 1. Install halfstep 9.0"),
    ],
)
def test_a_checkpoint_that_is_not_as_it_was_written(spoil, message, tmp_path):
    spoil(save(tmp_path, trained()))
    stepper = trained()
    before = everything(stepper)
    with pytest.raises(HalfstepError, match=message):
        load(tmp_path, stepper)
    assert_same(everything(stepper), before)


def test_other_things_than_checkpoints(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(HalfstepError, match=r"holds no checkpoint of halfstep, but model.safetensors\. Name the"):
        load(tmp_path, trained())
    with pytest.raises(HalfstepError, match=r"model\.safetensors: it is a file"):
        load(tmp_path / "model.safetensors", trained())
    with pytest.raises(HalfstepError, match=r"save of a Linear: it knows the state of a halfstep\.Stepper"):
        save(tmp_path, nn.Linear(1, 1))


class Clock:
    """A scheduler without a state."""

    def step(self):
        pass


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(HalfstepError, match=r"the scheduler Clock: it has no state_dict\(\)"):
        save(tmp_path, other(Other(), scheduler=lambda _: Clock()))
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(4, 1))
    stepper = Stepper(model, torch.optim.SGD(model.parameters()), "fp32", accumulate=2, watch=False)
    stepper.step(lambda: model(torch.tensor([[1], [2]])).sum())
    with pytest.raises(HalfstepError, match=r"a sparse gradient of 0\.weight: .* Save at a window's end"):
        save(tmp_path, stepper)
    assert names(tmp_path) == []
