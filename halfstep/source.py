"""Where workloads come from: a built-in one by its name, or a function in a file of the user's.

``load("path/to/file.py:workload")``, or ``load("charlm")`` for a built-in one, makes a :class:`Source`, which builds a
new Workload for each seed. An import error, a missing name, a wrong signature and a wrong return type each have a
message of their own.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.workload import Workload, binds, is_count, seed_everything, signature_of
from halfstep.workloads import BUILT_IN

SIGNATURE = "def workload(seed: int) -> halfstep.Workload"
"""What a user's function looks like."""


@dataclass(frozen=True)
class Source:
    """Builds a Workload from a seed: ``source(seed)`` seeds every generator of random numbers, then calls ``function``.

    default_steps, default_seeds: how many steps and seeds show a clear result; None where the file does not say
    (module constants DEFAULT_STEPS and DEFAULT_SEEDS).
    """

    spec: str
    function: Callable[..., Workload]
    options: Mapping[str, Any] = field(default_factory=dict)
    default_steps: int | None = None
    default_seeds: int | None = None
    file: Path | None = None

    def __call__(self, seed: int) -> Workload:
        seed_everything(seed)
        with running(self.file) if self.file else contextlib.nullcontext():
            workload = self.function(seed, **self.options)
        if not isinstance(workload, Workload):
            raise HalfstepError(
                self.spec,
                f"it returned {'None' if workload is None else 'a value of type ' + type(workload).__name__}",
                "End it with return halfstep.Workload(model=..., batches=..., loss=..., optimizer=...).",
            )
        return workload

    def under(self, policy: str) -> Source:
        """The same workload, told the policy that it will train under if its function takes one, to shard by it."""
        signature = signature_of(self.function)
        if signature is None or "policy" not in signature.parameters:
            return self
        return replace(self, options={**self.options, "policy": policy})


def load(spec: str, **options: Any) -> Source:
    """The Source that ``spec`` names: a built-in workload, or ``path/to/file.py:function`` (``:workload`` if left out).

    A file is executed once here, as ``python file.py`` would with its directory importable, but not as ``__main__``.
    ``options`` go to the function as keyword arguments.
    """
    if spec in BUILT_IN:
        module, name, file = importlib.import_module(BUILT_IN[spec]), "workload", None
    else:
        path, name = split(spec)
        module, file = execute(path), path.resolve()
    function = find_function(module, name, spec)
    check_call(function, spec, options)
    return Source(spec, function, options, _count(module, "DEFAULT_STEPS"), _count(module, "DEFAULT_SEEDS"), file)


def split(spec: str) -> tuple[Path, str]:
    """The file and the function that ``spec`` names."""
    head, colon, tail = spec.rpartition(":")
    path, name = (spec, "workload") if spec.endswith(".py") or not colon else (head, tail)
    if not path.endswith(".py"):
        close = difflib.get_close_matches(spec, list(BUILT_IN), n=1)
        raise HalfstepError(
            f"workload {spec!r}",
            f"no built-in workload has this name{_did_you_mean(close)}, and it is not a .py file",
            f"Use one of {', '.join(BUILT_IN)}, or path/to/file.py:function.",
        )
    if not Path(path).is_file():
        folder = Path(path).parent
        names = [file.name for file in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        close = difflib.get_close_matches(Path(path).name, names, n=1)
        why = f"there is no such file{_did_you_mean(close)}" if folder.is_dir() else f"there is no directory {folder}"
        raise HalfstepError(f"workload file {path}", why, f"Correct the path, or start one with halfstep new {path}.")
    return Path(path), name


def _did_you_mean(close: list[str]) -> str:
    return f" (did you mean {close[0]}?)" if close else ""


def execute(path: Path) -> ModuleType:
    """The module in ``path``, executed anew."""
    spec = importlib.util.spec_from_file_location(f"halfstep_workload_{path.stem}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up here
    with running(path.resolve()):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def running(file: Path) -> Iterator[None]:
    """Runs code of a user's file: its directory is importable, and what it raises becomes one HalfstepError."""
    directory = str(file.parent)
    sys.path.insert(0, directory)
    try:
        yield
    except HalfstepError:
        raise
    except (Exception, SystemExit) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise HalfstepError(
            _line_at_fault(error, file),
            f"{type(error).__name__}{': ' if message else ''}{message.rstrip('.')}",
            "Correct that line, or install the package that it needs."
            if isinstance(error, ImportError)
            else "Correct that line.",
        ) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


def _line_at_fault(error: BaseException, file: Path) -> str:
    """``train.py line 12``: the last line on the way to ``error`` that stands in the user's file or beside it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name} line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == file.parent]
    return f"{Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else file.name


def find_function(module: ModuleType, name: str, spec: str) -> Callable[..., Workload]:
    found = getattr(module, name, None)
    if found is None:
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        close = difflib.get_close_matches(name, functions, n=1)
        raise HalfstepError(
            spec,
            f"the file has no function {name!r}{_did_you_mean(close)}; "
            + (f"its functions are {', '.join(functions)}" if functions else "it defines no function at all"),
            f"Name one of them after the colon, or write {SIGNATURE}.",
        )
    if not callable(found):
        raise HalfstepError(
            spec,
            f"{name} is of type {type(found).__name__}, not a function, and every run needs a new Workload",
            f"Write {SIGNATURE}.",
        )
    function: Callable[..., Workload] = found
    return function


def check_call(function: Callable[..., Workload], spec: str, options: Mapping[str, Any]) -> None:
    signature = signature_of(function)
    if signature is None or binds(signature, 0, **options):
        return
    if not binds(signature, 0):
        raise HalfstepError(
            spec, f"it takes {signature} and is called with the seed alone, as workload(0)", f"Write {SIGNATURE}."
        )
    known = list(signature.parameters)[1:]
    unknown = [option for option in options if option not in known]
    close = difflib.get_close_matches(unknown[0], known, n=1) if unknown else []
    raise HalfstepError(
        f"{spec} with option {', '.join(unknown or options)}",
        f"it takes no such option{_did_you_mean(close)}",
        f"Its options are {', '.join(known)}." if known else "It has no options; leave them out.",
    )


def _count(module: ModuleType, name: str) -> int | None:
    value: int | None = getattr(module, name, None)
    if value is not None and not is_count(value):
        raise HalfstepError(f"{name} = {value!r}", "it is not a count", "Use a whole number from 1, or leave it out.")
    return value
