"""halfstep watch: the live page, the view in the terminal, check, export and notify."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from halfstep.output import HtmlOption, JsonOption, check_writable, finish


class _ServesByDefault(TyperGroup):
    """A group whose first word may be left out: ``halfstep watch runs`` serves ``runs``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "--help"}:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


watch_app = typer.Typer(
    cls=_ServesByDefault,
    no_args_is_help=False,
    epilog="serve may be left out. Its options are --terminal, --rank, --host, --port and --golden.",
)
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, as in Stepper(log=...).")]


@watch_app.command()
def serve(
    folder: Annotated[
        str, typer.Argument(metavar="RUNS_DIR", help="The folder of runs; of one run with --terminal.")
    ] = "runs",
    terminal: Annotated[bool, typer.Option("--terminal", help="Show one run here instead of serving a page.")] = False,
    rank: Annotated[int, typer.Option(metavar="N", help="The rank that --terminal shows.")] = 0,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; another address than this needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port of the page; 0 takes a free one.")] = 8347,
    golden: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="A run whose loss the others should follow; repeatable.")
    ] = None,
) -> None:
    """Serve a live page of the runs in RUNS_DIR. The word serve may be left out: halfstep watch RUNS_DIR."""
    from halfstep.watch.server import serve as run
    from halfstep.watch.terminal import show

    if terminal:
        with suppress(KeyboardInterrupt):  # how a viewer ends
            show(Path(folder), rank)
        return
    run(
        Path(folder),
        host,
        port,
        os.environ.get("HALFSTEP_WATCH_TOKEN") or None,
        golden or (),
        lambda url: print(f"watching {folder} at {url} (Ctrl-C ends it)", flush=True),
    )


@watch_app.command()
def check(
    folder: RunArgument,
    settings: Annotated[
        str | None, typer.Option(metavar="FILE.toml", help="Limits of rules and golden runs; see docs/watch.md.")
    ] = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Replay every rule over a run, finished or not, and say what it alerts."""
    check_writable(json_file, html_file)
    from halfstep.watch.check import check as run
    from halfstep.watch.settings import Watch

    finish(run(Path(folder), None if settings is None else Watch.read(settings)), json_file, html_file)


@watch_app.command()
def export(
    folder: RunArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="tensorboard:FOLDER, wandb:PROJECT, mlflow:EXPERIMENT or prometheus:FILE."
        ),
    ],
    json_file: JsonOption = None,
) -> None:
    """Write the log of a run into another tool."""
    check_writable(json_file)
    from halfstep.watch.export import export as run

    finish(run(Path(folder), target), json_file, None)


@watch_app.command()
def notify(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGETS",
            help="webhook:URL, command:WORDS, or a URL of apprise; $NAME is read from the environment.",
        ),
    ],
    json_file: JsonOption = None,
) -> None:
    """Send a test message to each target, and say whether it arrived."""
    check_writable(json_file)
    from halfstep.watch.notify import send_test

    finish(send_test(targets), json_file, None)
