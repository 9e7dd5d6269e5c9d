"""The command: parse, call, print.

Exit status: 0 fine, 1 the tool found what it looks for, 2 the call was wrong. An error is one line on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep import __version__, job
from halfstep.errors import HalfstepError
from halfstep.output import HtmlOption, JsonOption, check_writable, emit, finish, need_torch
from halfstep.progress import bar
from halfstep.train.command import train
from halfstep.watch.command import watch_app

app = typer.Typer(
    help="Mixed-precision training for PyTorch that can be trusted.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

WorkloadArgument = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", help="A built-in workload (charlm, digits, mlp, fragile) or FILE.py:FUNCTION."),
]
DeviceOption = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N; CUDA if it is there.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="P",
        help="What to look at: a policy or FILE.toml.",
        show_default="auto's on a GPU, else fp16",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the run.")]
StepOption = Annotated[int, typer.Option("--step", metavar="N", help="Train up to this step and look there.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"halfstep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(device: DeviceOption = None, json_file: JsonOption = None) -> None:
    """Print the device, the formats it computes, TF32 switches, versions, and the policy that auto would choose."""
    from halfstep.doctor import examine

    check_writable(json_file)
    report = examine(device)
    emit(report, json_file)
    raise typer.Exit(1 if report.problem else 0)


@app.command()
def compare(
    workload: WorkloadArgument,
    policies: Annotated[
        str, typer.Option(metavar="LIST", help="Policies by comma; the first is the reference.")
    ] = "fp32,bf16,fp16",
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Trials of each policy.", show_default="5")] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer steps of a trial.", show_default="the workload's")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(metavar="PCT", help="Difference that matters, in % of the reference's final loss."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Other data, for a workload that takes some (charlm: any text).")
    ] = None,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Train WORKLOAD in each policy from the same seeds, and judge each against the first."""
    if job.current.speaks:
        check_writable(json_file, html_file)
    need_torch()
    from halfstep.compare import compare as run
    from halfstep.compare.page import write_html
    from halfstep.source import load

    source = load(workload, **({} if data is None else {"data": data}))
    steps = (source.default_steps or 100) if steps is None else steps
    seeds = (source.default_seeds or 5) if seeds is None else seeds
    names = _names(policies)
    with bar(steps * seeds * len(names)) as advance:
        report, trials = run(
            source, names, steps, seeds, device, margin, lambda p, seed: advance(f"seed {seed + 1} of {seeds}, {p}")
        )
    if job.current.speaks:
        if report.interrupted:
            print(f"halfstep: interrupted; the report holds the {len(trials)} trials that had ended", file=sys.stderr)
        if html_file is not None:
            write_html(report, trials, Path(html_file))
        emit(report, json_file)
    raise typer.Exit(1 if report.found else 0)


@app.command()
def trace(
    workload: WorkloadArgument,
    policy: PolicyOption = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps to run at most.", show_default="the workload's")
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Run WORKLOAD until the first non-finite value, and say which operation made it and what mends it."""
    source, chosen = _prepare(workload, policy, device, json_file, html_file)
    from halfstep.explain.trace import trace as run

    steps = (source.default_steps or 100) if steps is None else steps
    with bar(steps) as advance:
        report = run(source, chosen, steps, seed, device, advance)
    if job.current.speaks:
        finish(report, json_file, html_file)
    raise typer.Exit(1 if report.found else 0)


@app.command()
def ranges(
    workload: WorkloadArgument,
    policy: PolicyOption = None,
    step: StepOption = 5,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Lay what the modules of WORKLOAD compute against what each format can hold, before and after scaling."""
    source, chosen = _prepare(workload, policy, device, json_file, html_file)
    from halfstep.explain.ranges import ranges as run

    finish(run(source, chosen, step, seed, device), json_file, html_file)


@app.command()
def audit(
    workload: WorkloadArgument,
    policy: PolicyOption = None,
    step: StepOption = 5,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Run each operation of a step of WORKLOAD again in float64, and name those that lose more than their format."""
    source, chosen = _prepare(workload, policy, device, json_file, html_file)
    from halfstep.explain.audit import audit as run

    finish(run(source, chosen, step, seed, device), json_file, html_file)


@app.command()
def diff(
    workload: WorkloadArgument,
    policies: Annotated[str, typer.Option(metavar="A,B", help="Two policies; A is the reference.")] = "fp32,fp16",
    step: StepOption = 5,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Run one step of WORKLOAD in two policies, operation by operation, and name the first that differs too much."""
    source, _ = _prepare(workload, None, device, json_file, html_file)
    from halfstep.explain.diff import diff as run

    finish(run(source, _names(policies), step, seed, device), json_file, html_file)


@app.command()
def tune(
    workload: WorkloadArgument,
    policy: PolicyOption = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of a probe.", show_default="the workload's")
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Seeds that confirm the result.")] = 3,
    margin: Annotated[
        float | None, typer.Option(metavar="PCT", help="Difference that matters, in % of fp32's final loss.")
    ] = None,
    probes: Annotated[int | None, typer.Option(metavar="N", help="Training runs to spend at most.")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", help="Minutes to spend at most.")] = None,
    policy_file: Annotated[
        str | None, typer.Option(metavar="FILE.toml", help="The policy file to write.", show_default="WORKLOAD.toml")
    ] = None,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Search for the smallest set of modules of WORKLOAD to keep in fp32, and write the policy that does it."""
    source, chosen = _prepare(workload, policy, device, json_file, html_file, policy_file)
    from halfstep.explain.tune import tune as run

    steps = (source.default_steps or 100) if steps is None else steps
    with bar(steps) as advance:
        report = run(
            source,
            chosen,
            steps=steps,
            seeds=seeds,
            device=device,
            max_probes=probes,
            minutes=minutes,
            margin_pct=margin,
            policy_file=policy_file,
            progress=advance,
        )
    finish(report, json_file, html_file)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD|MODEL",
            help="A workload as everywhere, or a model: FILE.py:Class, transformers:NAME, timm:NAME.",
        ),
    ],
    card: Annotated[
        str | None, typer.Option(metavar="NAME", help="The card, such as 'RTX 3070'; cpu is this processor.")
    ] = None,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Memory in place of the card's own.")] = None,
    policies: Annotated[
        str, typer.Option(metavar="LIST", help="Policies by comma; the others are compared with the first.")
    ] = "fp32,bf16,fp16",
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Samples of a micro-batch.", show_default="the workload's")
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="One sample of a model alone: 3x224x224, int:1024.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Also divide the step over N ranks: ZeRO 1, 2, 3 and FSDP.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's rates, and use them for the speed.")
    ] = False,
    snapshot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the step for PyTorch's memory viewer.")
    ] = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Plan a training step of WORKLOAD or MODEL on a card that need not be here: memory, what fits, and speed."""
    check_writable(json_file, html_file, snapshot)
    from halfstep.plan import plan as run

    with bar(1) as advance:
        report = run(
            model,
            _names(policies),
            card=card,
            memory_gib=memory,
            batch_size=batch,
            inputs=inputs,
            num_ranks=ranks,
            calibrates=calibrate,
            snapshot=snapshot,
            progress=lambda text: advance(text, 0),
        )
    finish(report, json_file, html_file)


@app.command()
def measure(
    workload: WorkloadArgument,
    policies: Annotated[str, typer.Option(metavar="LIST", help="Policies by comma.")] = "fp32,bf16,fp16",
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Samples of a micro-batch.", show_default="the workload's")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Interleaved repeats of each policy.")] = 5,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Measure memory and speed of WORKLOAD's training step in each policy here, beside what plan predicts."""
    check_writable(json_file, html_file)
    need_torch()
    from halfstep.plan.measure_report import measure as run

    names = _names(policies)
    with bar((repeats + 2) * len(names)) as advance:
        report = run(workload, names, batch_size=batch, repeats=repeats, device=device, progress=advance)
    finish(report, json_file, html_file)


@app.command()
def lint(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATHS", help="Files and folders; - is standard input.", show_default="."),
    ] = None,
    select: Annotated[
        str | None, typer.Option(metavar="LIST", help="Rules by comma: HS101, HS1 for all HS1xx, or a name.")
    ] = None,
    ignore: Annotated[str | None, typer.Option(metavar="LIST", help="Rules to leave out.")] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="LIST", help="What to leave out of folders: patterns as in .gitignore.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply the safe fixes.")] = False,
    unsafe_fixes: Annotated[bool, typer.Option("--unsafe-fixes", help="Apply every fix.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what the fixes would change, and change nothing.")] = False,
    migrate: Annotated[bool, typer.Option("--migrate", help="Rewrite deprecated names to the present ones.")] = False,
    to_halfstep: Annotated[
        bool, typer.Option("--to-halfstep", help="Rewrite loops into a Stepper where every step is understood.")
    ] = False,
    format: Annotated[str, typer.Option(metavar="F", help="text, json, sarif or github.")] = "text",
    json_file: JsonOption = None,
    statistics: Annotated[bool, typer.Option("--statistics", help="Count by rule.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Print the page of a rule and stop.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Lint again whenever a file changes.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Read every file, and remember nothing.")] = False,
    stdin_filename: Annotated[
        str | None, typer.Option(metavar="NAME", help="What standard input is called, for settings and messages.")
    ] = None,
) -> None:
    """Find the mixed-precision mistakes that run without an error, in Python files and notebooks. Needs no torch."""
    check_writable(json_file)
    from halfstep.lint.command import Call
    from halfstep.lint.command import lint as run

    call = Call(
        paths=paths or ["."],
        select=None if select is None else _names(select),
        ignore=None if ignore is None else _names(ignore),
        exclude=None if exclude is None else _names(exclude),
        fix=fix,
        unsafe_fixes=unsafe_fixes,
        diff=diff,
        migrate=migrate,
        to_halfstep=to_halfstep,
        format=format,
        json_file=json_file,
        statistics=statistics,
        explain=explain,
        watch=watch,
        no_cache=no_cache,
        stdin_filename=stdin_filename,
    )
    raise typer.Exit(run(call))


app.add_typer(watch_app, name="watch", help="Watch runs: halfstep watch RUNS_DIR shows them on a live page.")


app.command()(train)


@app.command()
def new(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write; an existing one is kept.")],
) -> None:
    """Write a commented workload file to fill in; it runs as it stands."""
    from halfstep.template import write_template

    write_template(Path(file))
    print(f"wrote {file}: fill it in, then run  halfstep compare {file}:workload")


def _names(text: str) -> list[str]:
    """What stands between the commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _prepare(workload: str, policy: str | None, device: str | None, *files: str | None) -> tuple[Any, Any]:
    """The source and the policy that a tool looks at, after refusing what would fail later."""
    if job.current.speaks:
        check_writable(*files)
    need_torch()
    from halfstep.explain.rehearsal import default_policy
    from halfstep.policy import Policy
    from halfstep.source import load

    source = load(workload)
    return source, default_policy(device) if policy is None else Policy.parse(policy)


def run(arguments: Sequence[str]) -> int:
    """Run the command with ``arguments`` and return its exit status."""
    # --json without a file means standard output.
    words = list(arguments)
    for at, word in enumerate(words):
        if word == "--json" and (at + 1 == len(words) or (words[at + 1] != "-" and words[at + 1].startswith("-"))):
            words[at] = "--json=-"
    job.current = job.Job()
    try:
        return job.current.end(*_run(words))
    except Exception as error:
        if not job.current.hears(error):
            return 2
        raise


def _run(words: list[str]) -> tuple[int, str | None]:
    """The exit status of the command, and what is to be said of an error."""
    try:
        job.current.open(" ".join(words[:1]))
        status = int(app(words, standalone_mode=False, prog_name="halfstep") or 0)
        if status == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()
        return status, None
    except HalfstepError as error:
        return 2, str(error)
    except KeyboardInterrupt:
        # One that fell into an exec of text, as dataclasses and torch do while they are imported, makes Python end by
        # the signal although it was caught here. The next exec takes that back.
        exec("")
        return 130, "interrupted; nothing was left half-written"
    except BrokenPipeError:
        # The reader of our output has gone, as with `halfstep ... | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141, None
    except OSError as error:
        return 2, f"{error.filename or 'a file'}: {error.strerror}. Nothing was left half-written"
    except Exception as error:
        # Both click and the copy of it inside typer raise usage errors of this shape.
        if not hasattr(error, "format_message"):
            raise
        usage = str(error.format_message())
        if not usage.strip() or "\n" in usage:
            # A call without a command: the help, which typer has printed already where it draws it with rich.
            print(usage.rstrip(), file=sys.stderr, end="\n" if usage.strip() else "")
            return 2, None
        return 2, f"{usage.rstrip('.')}. See halfstep {' '.join([*words[:1], '--help'])}"


def main() -> None:
    """The entry point of the ``halfstep`` command."""
    # Threads that spin while they wait make a busy two-core machine five times slower, and an idle one no faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(run(sys.argv[1:]))
