"""Strict tests: one thread, so that bits and times do not depend on the load, and nothing left switched on."""

import pytest
import torch
from reference.nets import CPU, nesting
from torch import nn
from world import World

from halfstep import autocast_mode, cpu16, oplist, region

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """A test leaves the default dtype, autocast and our switches as it found them.

    Autocast's nesting count above zero would leave stale casts to the next test.
    """
    yield
    autocast_mode._standing.close()
    assert nesting() == 0
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert region._opened == []
    assert oplist.active is None
    assert not cpu16.active
    assert not cpu16.sums_active


@pytest.fixture(scope="module")
def kernels_stay():
    """One region that lives as long as a file, so that not every test lays the CPU's kernels anew."""
    return region.Region(nn.Linear(1, 1), "bf16", CPU)


@pytest.fixture(scope="session")
def world2():
    """Two ranks, for all tests of a process; see tests/world.py."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world4():
    world = World(4)
    yield world
    world.close()


LONGEST = (
    "docs",
    "planner",
    "plan_advice",
    "watch_browser",
    "lint_fuzz",
    "loops_compile",
    "lint_own",
    "watch_exporters",
)
"""Files that take longest. They come first, so that no process is left alone with one at the end."""


def pytest_collection_modifyitems(items):
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
