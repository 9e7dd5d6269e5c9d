"""Imports flow one way: a module imports only from rows above its own, and the torch-free ones load without torch."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "halfstep"
ROWS = [
    "errors",
    "formats files report",
    "hardware events page",
    "policy output",
    "lint watch",
    "kernels dtypes readback",
    "oplist cpu16 scale record snapshot gradients layouts states weights fast_path",
    "ranks",
    "chunks loading guard updates alignment window",
    "replay",
    "master",
    "optimizer closure",
    "region grad_scaler",
    "inference autocast_mode diagnosis",
    "watcher",
    "stepper",
    "average distributed",
    "workload",
    "workloads share",
    "source loop interruption job",
    "compare template doctor progress",
    "explain plan",
    "integrations",
    "train",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row.split()}
TORCH_FREE = {
    "lint",
    "watch",
    "errors",
    "formats",
    "files",
    "report",
    "page",
    "output",
    "events",
    "hardware",
    "policy",
    "doctor",
    "template",
    "job",
    "progress",
    "cli",
    "__main__",
}


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(tree):
    """Every dotted name that a tree imports, also inside functions. The package uses absolute imports alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(part, tree):
    for name in imports_of(tree):
        head, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if head == "halfstep" and other != part and other in RANK and RANK[other] >= RANK[part]:
            yield f"{part} must not import {name}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path):
    part = part_of(path)
    if part == "__init__":
        return
    assert part in RANK, f"place {part} in ROWS"
    assert list(violations(part, ast.parse(path.read_text()))) == []


def test_the_check_finds_an_import_from_below():
    assert list(violations("scale", ast.parse("def f():\n    from halfstep.stepper import Stepper")))
    assert not list(violations("stepper", ast.parse("from halfstep.scale import make_scale")))


def test_torch_free_parts_do_not_load_torch():
    modules = ", ".join(f"halfstep.{name}" for name in sorted(TORCH_FREE - {"__main__"}))
    program = f"import sys, halfstep, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", program]).returncode == 0


def test_every_part_of_watch_loads_on_the_base_install():
    """Neither torch nor what the extras bring is needed, but by the page while it is served."""
    names = {module.name for module in pkgutil.walk_packages([str(ROOT / "watch")], "halfstep.watch.")}
    names -= {"halfstep.watch.assets", "halfstep.watch.routes"}
    extras = ("torch", "numpy", "plotly", "starlette", "uvicorn", "apprise", "tensorboard", "wandb", "mlflow")
    gone = "; ".join(f"sys.modules[{name!r}] = None" for name in (*extras, "prometheus_client"))
    program = f"import sys; {gone}; import {', '.join(sorted(names))}"
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert result.stderr == ""
    assert len(names) > 30


def test_a_name_that_needs_torch_says_so_without_it():
    program = (
        "import sys; sys.modules['torch'] = None; import halfstep; print(halfstep.Policy('fp16')); halfstep.Stepper"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "fp16\n"
    assert "halfstep.Stepper: it needs torch, which is not installed. Run: pip install" in result.stderr


def test_every_public_name_loads():
    import halfstep

    for name in halfstep.__all__:
        assert getattr(halfstep, name).__name__.removeprefix("halfstep.") == name
    assert set(halfstep.__all__) <= set(dir(halfstep))
    with pytest.raises(AttributeError, match="no attribute 'stepper_'"):
        halfstep.stepper_  # noqa: B018
