"""How the command gives a report: printed, as JSON, as a page; and the exit status that it means."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from halfstep.errors import HalfstepError
from halfstep.files import write_whole

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - or nothing prints it instead.")
]
HtmlOption = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write the report as one HTML file.")]


def finish(report: Any, json_file: str | None, html_file: str | None) -> None:
    """Write and print the report of a tool, and stop with the status that it means."""
    if html_file is not None:
        from halfstep.page import write_html

        write_html(report, html_file)
    emit(report, json_file)
    raise typer.Exit(1 if report.found else 0)


def emit(report: Any, json_file: str | None) -> None:
    """Print the report, or its JSON where that goes to standard output."""
    if json_file != "-":
        _print(report)
    if json_file is not None:
        text = json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"
        if json_file == "-":
            print(text, end="")
        else:
            write_whole(json_file, text)


def _print(report: Any) -> None:
    if hasattr(report, "render") and sys.stdout.isatty():
        report.render(Console())
    else:
        print(report)


def check_writable(*files: str | None) -> None:
    """Refuse before the work what would fail after it."""
    for file in files:
        if file in (None, "-"):
            continue
        path = Path(str(file))
        if path.is_dir() or not path.parent.is_dir():
            why = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
            raise HalfstepError(f"output file {path}", why, "Name a file in a directory that exists.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise HalfstepError(f"output file {path}", "it cannot be written here", "Choose another place.")


def need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise HalfstepError(
            "halfstep without torch", "this command trains, and torch is not installed", "pip install 'halfstep[torch]'"
        ) from None
