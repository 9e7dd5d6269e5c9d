"""The file that halfstep new writes: it loads, it trains, and nothing is overwritten."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest

from halfstep.errors import HalfstepError
from halfstep.source import load
from halfstep.template import TEMPLATE, write_template
from halfstep.workload import Workload, stream


def test_the_template_loads_and_learns_as_it_is(tmp_path):
    path = write_template(tmp_path / "mine.py")
    source = load(f"{path}:workload")
    workload = source(0)
    optimizer = workload.optimizer(workload.model.parameters())
    scheduler = workload.scheduler(optimizer)
    before = float(workload.evaluate(workload.model))
    for batch in itertools.islice(stream(workload), source.default_steps):
        workload.loss(workload.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert float(workload.evaluate(workload.model)) < 0.1 * before
    assert "halfstep compare mine.py" in path.read_text()


def test_the_template_shows_every_field_and_the_sum_and_count_form():
    assert all(f"        {field.name}=" in TEMPLATE for field in dataclasses.fields(Workload))
    assert "(sum, count)" in TEMPLATE
    assert 'reduction="sum"' in TEMPLATE


def test_the_template_is_tidy(tmp_path):
    path = write_template(tmp_path / "mine.py")
    ruff = [sys.executable, "-m", "ruff"]
    if subprocess.run([*ruff, "--version"], capture_output=True).returncode:
        pytest.skip("ruff is not installed")
    for check in ("check", "format --check"):
        run = subprocess.run(
            [*ruff, *check.split(), "--isolated", "--line-length=120", path], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("precious")
    with pytest.raises(
        HalfstepError, match=r"mine.py: it exists already, and would be overwritten. Choose another name"
    ):
        write_template(path)
    assert path.read_text() == "precious"


def test_a_path_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(HalfstepError, match=r"there is no directory .*nowhere. Create it first: mkdir -p"):
        write_template(tmp_path / "nowhere" / "mine.py")
    with pytest.raises(HalfstepError, match=r"mine.txt: its name does not end in .py. Use mine.py"):
        write_template(tmp_path / "mine.txt")
