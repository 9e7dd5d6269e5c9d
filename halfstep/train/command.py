"""``halfstep train TASK``: its flags, each with a key of the same name in a TOML file."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from halfstep import job
from halfstep.errors import HalfstepError
from halfstep.output import JsonOption, check_writable, emit, need_torch
from halfstep.progress import bar, lines


def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="pretrain, sft, dpo or kto.")],
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Flags by name from a TOML file; those given here win.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="A transformers model's folder, or tiny.", show_default="tiny")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="FILE.jsonl, a DIR, or builtin.", show_default="builtin")
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="For log, checkpoints, model.", show_default="one in runs/")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="P", help="A policy or FILE.toml.", show_default="auto")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Optimizer steps.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Samples in a micro-batch.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help="Micro-batches in a step.", show_default="1")
    ] = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="Learning rate.", show_default="the task's")] = None,
    max_norm: Annotated[
        float | None, typer.Option(metavar="X", help="Norm to clip gradients to, 0 for none.", show_default="1")
    ] = None,
    max_length: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sample.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="adamw, adamw8bit, adamw4bit, sgd or adafactor.", show_default="adamw"),
    ] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--no-lora", help="Train adapters on frozen weights.")] = None,
    lora_rank: Annotated[int | None, typer.Option(metavar="R", help="Rank of an adapter.", show_default="16")] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Layers that get one, by comma.", show_default="all-linear"),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="4bit", help="With --lora: hold the weights in 4 bits.")
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option("--checkpointing/--no-checkpointing", help="Keep no activations of blocks."),
    ] = None,
    save_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between two checkpoints.")] = None,
    resume: Annotated[bool | None, typer.Option("--resume", help="Go on from the last checkpoint in --output.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of order, dropout, new weights.", show_default="0")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu or cuda, the first card; CUDA if it is there.")
    ] = None,
    plan: Annotated[
        bool | None, typer.Option("--plan/--no-plan", help="Plan the memory first, and refuse what cannot fit.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory to plan for.", show_default="the device's own")
    ] = None,
    options: Annotated[
        str | None, typer.Option(metavar="TEXT", help="TRL's arguments, as 'warmup_steps=10 beta=0.2'.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Train a language model in the precision that fits the machine: TASK is pretrain, sft, dpo or kto."""
    given = {name: value for name, value in locals().items() if name not in ("task", "config", "json_file")}
    if job.current.speaks:
        check_writable(json_file)
    from halfstep.train.settings import Settings

    settings = Settings.of(task, given, config)
    need_torch()
    _need_train()
    from halfstep.train.quiet import quieten

    quieten()
    from halfstep.train.run import train as run

    with bar(0) as advance:
        report = run(settings, advance if sys.stderr.isatty() else lines())
    if job.current.speaks:
        emit(report, json_file)
    raise typer.Exit(1 if report.found else 0)


def _need_train() -> None:
    for package in ("transformers", "trl", "peft", "accelerate", "datasets"):
        if importlib.util.find_spec(package) is None:
            raise HalfstepError(
                "halfstep train", f"it needs {package}, which is not installed", "pip install 'halfstep[train]'"
            )
