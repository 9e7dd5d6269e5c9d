"""How far plans are from the truth: live bytes on a CPU, peaks that others measured on a T4, and a GPU if one is here.

    python benchmarks/planner.py                    everything
    python benchmarks/planner.py cpu t4             these parts alone: cpu, t4, attention, gpu, time

cpu        peak bytes of the tensors of a step, planned, against those of live tensors in a real one. To reach: 0 %.
t4         bytes allocated, planned, against the eight peaks in torch-preflight's tests/calibration/measured_peaks.json:
           a Tesla T4, torch 2.11, autocast, AdamW, the second step. To reach: 2.5 % in the mean, 5 % at worst. No
           number here was fitted to them. Their harness takes bf16 where torch.cuda.is_bf16_supported() is true, and on
           a T4 it is, by emulation; no fused kernel of attention serves bf16 there. Its step() is a function, so that
           the model's output lives until the optimizer is done.
attention  what the kernel of attention moves: the peak with each, all else equal.
gpu        torch.cuda.max_memory_allocated of real steps against plans, for models, formats and kernels of attention.
time       seconds and memory that ``halfstep plan`` takes. To reach: a 7B model 15 s and 1 GB, a 125M one 8 s.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from halfstep.compare.memory import LiveBytes
from halfstep.errors import HalfstepError
from halfstep.hardware import detect
from halfstep.loop import make_stepper
from halfstep.plan.allocator import Simulation, simulate
from halfstep.plan.build import build
from halfstep.plan.fake_step import fake_step
from halfstep.plan.measure import Run, target_on
from halfstep.plan.outside import workspaces_of
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target, target_of
from halfstep.workload import Workload, stream

MIB = 1 << 20
MODELS = Path(__file__).with_name("planner_models.py")

CPU_WORKLOADS = ("mlp", "digits", "charlm", f"{MODELS}:charlm_accumulated", "fragile")
CPU_POLICIES = ("fp32", "bf16", "fp16", "bf16 master=split16", "bf16 master=copy", "fp16 master=split8")

T4_PEAKS = {  # bytes allocated and reserved
    "gpt2_4x128": (2705153536, 3042967552),
    "gpt2_8x256": (5736883712, 6092226560),
    "distilbert_4x128": (1354818048, 1501560832),
    "distilbert_8x256": (1757328384, 1954545664),
    "bert_4x128": (2209738240, 2483027968),
    "bert_8x256": (3185408000, 3491758080),
    "resnet50_16": (1119203840, 1195376640),
    "resnet50_32": (1839903232, 2000683008),
}

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def main(parts: Sequence[str]) -> None:
    for name, part in PARTS.items():
        if not parts or name in parts:
            print(f"\n{name}", flush=True)
            part()


def row(*cells: object, widths: Sequence[int] = (34, 26, 12, 12, 9)) -> None:
    head = f"{cells[0]!s:{widths[0]}s} {cells[1]!s:{widths[1]}s}"
    print(head, *(f"{cell!s:>{width}s}" for cell, width in zip(cells[2:], widths[2:], strict=False)), flush=True)


def percent(planned: float, measured: float) -> str:
    return f"{planned / measured - 1:+.2%}"


def spec(name: str) -> str:
    return f"{MODELS}:{name}"


def in_allocator(trace: StepTrace, target: Target) -> Simulation:
    """The step in torch's allocator, with what cuBLAS takes from it."""
    return simulate(trace, before=[each.nbytes for each in workspaces_of(target, trace)])


# --- cpu -----------------------------------------------------------------------------------------------------------


def cpu() -> None:
    row("workload", "policy", "planned B", "measured B", "error")
    target, errors = target_of("cpu"), []
    for workload in CPU_WORKLOADS:
        for policy in CPU_POLICIES:
            if workload == "fragile" and "fp16" in policy:
                continue  # it is made to overflow in fp16, where no step is applied that could be measured
            planned = fake_step(Subject(workload), policy, target).peak.nbytes
            measured = live_bytes(build(Subject(workload)), policy)
            errors.append(abs(planned / measured - 1))
            row(workload.rpartition(":")[2], policy, planned, measured, percent(planned, measured))
    print(f"mean error {statistics.mean(errors):.4%}, worst {max(errors):.4%}, of {len(errors)}")


def live_bytes(workload: Workload, policy: str) -> int:
    """Peak of live tensors in the fourth window of a real run, when every window is like the one before.

    Counted are the model, what the Stepper holds, and each micro-batch in memory of its own, as on a card.
    """
    live = LiveBytes()
    with live:
        stepper = make_stepper(workload, policy, "cpu")
    live.count([*stepper.model.parameters(), *stepper.model.buffers()])
    batches = stream(workload)
    gc.collect()
    gc.disable()  # else the moment at which a cycle of Python objects frees its tensors would depend on the machine
    try:
        for _ in range(4):
            live.peak, report = live.now, None
            while report is None:
                batch = tree_map_only(torch.Tensor, torch.clone, next(batches))
                live.count(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
                with live:
                    report = stepper.step(lambda batch=batch: workload.loss(stepper.model, batch))
                del batch
    finally:
        gc.enable()
    return live.peak


# --- t4 ------------------------------------------------------------------------------------------------------------


def emulating_t4() -> Target:
    """A T4 that is asked for bf16, which it emulates."""
    target = target_of("T4")
    hardware = target.hardware
    return dataclasses.replace(target, hardware=dataclasses.replace(hardware, native=hardware.native | {"bf16"}))


def t4() -> None:
    row("run", "peak in", "planned MiB", "T4 MiB", "error", "reserved", "T4", "error", widths=T4_WIDTHS)
    target = emulating_t4()
    errors = []
    for name, (allocated, reserved) in T4_PEAKS.items():
        trace = fake_step(Subject(spec(name)), "bf16", target)
        found = in_allocator(trace, target)
        errors.append((abs(found.peak_allocated / allocated - 1), abs(found.peak_reserved / reserved - 1)))
        row(
            name,
            trace.phase_at(trace.peak.time),
            round(found.peak_allocated / MIB),
            round(allocated / MIB),
            percent(found.peak_allocated, allocated),
            round(found.peak_reserved / MIB),
            round(reserved / MIB),
            percent(found.peak_reserved, reserved),
            widths=T4_WIDTHS,
        )
    for what, values in zip(("allocated", "reserved"), zip(*errors, strict=True), strict=True):
        print(f"{what}: mean error {statistics.mean(values):.2%}, worst {max(values):.2%}")


T4_WIDTHS = (18, 9, 12, 8, 8, 9, 8, 8)

# --- attention -----------------------------------------------------------------------------------------------------


def attention() -> None:
    row("run, on an A100", "kernel", "tensors MiB", "of flash", "")
    target = target_of("A100 SXM4 80GB")
    for name in ("gpt2_8x256", "distilbert_8x256", "bert_8x256"):
        peaks = {}
        for kernel in ("flash", "memory-efficient", "math"):
            with sdpa_kernel(KERNELS[kernel]):
                peaks[kernel] = fake_step(Subject(spec(name)), "bf16", target).peak.nbytes
            row(name, kernel, round(peaks[kernel] / MIB), f"{peaks[kernel] / peaks['flash']:.2f}x", "")


# --- gpu -----------------------------------------------------------------------------------------------------------


def gpu() -> None:
    if not torch.cuda.is_available():
        print("no GPU here")
        return
    rows = [("resnet50_16", policy, None) for policy in ("fp32", "fp16", "bf16")]
    rows += [("llama_small", policy, kernel) for policy in ("fp32", "fp16", "bf16") for kernel in (None, *KERNELS)]
    # A process for each, as for a user: what one run leaves in the allocator would be in the next one's figures.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for name, nbytes in pool.submit(fixed_bytes).result().items():
            print(f"{name}: {nbytes / MIB:.1f} MiB")
        row("model", "policy", "planned MiB", "measured", "error", "attention")
        for each in rows:
            print(pool.submit(gpu_row, *each).result(), flush=True)


def fixed_bytes() -> dict[str, int]:
    """What the card holds before and after the first product, besides torch's tensors."""

    def outside() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    torch.cuda.init()
    found = {"outside of torch after init": outside()}
    x = torch.ones(256, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    y = x @ x
    found["cuBLAS workspace"] = torch.cuda.memory_allocated() - before - y.nbytes
    torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3])
    torch.cuda.synchronize()
    found["outside of torch after cuBLAS and cuDNN"] = outside()
    return found


def gpu_row(name: str, policy: str, kernel: str | None) -> str:
    only = sdpa_kernel(KERNELS[kernel]) if kernel else nullcontext()
    head = f"{name:34s} {policy:6s} {kernel or 'as chosen':19s}"
    subject, target = Subject(spec(name)), target_on(detect("cuda"))
    try:
        with only:
            workload = build(subject)
            run = Run(workload, make_stepper(workload, policy, "cuda"), None)
            for _ in range(3):
                run.window(run.stepper.step)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run.window(run.stepper.step)
            torch.cuda.synchronize()
            measured = torch.cuda.max_memory_allocated()
            trace = fake_step(subject, policy, target)
    except (HalfstepError, RuntimeError) as error:
        return f"{head} {str(error).splitlines()[0]}"
    planned = in_allocator(trace, target).peak_allocated
    chosen = "; ".join(trace.attention or ())
    figures = f"{planned / MIB:12.1f} {measured / MIB:12.1f} {percent(planned, measured):>9s}"
    return f"{head} {figures}  {chosen}"


# --- time ----------------------------------------------------------------------------------------------------------


def plan_time() -> None:
    row("model", "", "seconds", "MB in all", "largest MB")
    for name in ("llama_7b", "gpt_125m"):
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "halfstep", "plan", spec(name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        most, largest = 0, 0
        while process.poll() is None:
            sizes = [resident(pid) for pid in family(process.pid)]
            most, largest = max(most, sum(sizes)), max(largest, *sizes)
            time.sleep(0.25)  # more often, and the look at its pages slows what it looks at
        assert process.stdout is not None
        output = process.stdout.read().strip().splitlines()
        if process.returncode:
            print(f"{name}: {output[-1] if output else 'no output'}")
        else:
            seconds = f"{time.perf_counter() - start:.1f}"
            row(name, "", seconds, round(most / 1e6), round(largest / 1e6))


def family(pid: int) -> Iterator[int]:
    """A process, and those that it and they have started."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
        children += [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return  # it has ended
    for child in children:
        yield from family(int(child))


def resident(pid: int) -> int:
    """Bytes of memory of a process; what it shares with others is divided among them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


PARTS: dict[str, Any] = {"cpu": cpu, "t4": t4, "attention": attention, "gpu": gpu, "time": plan_time}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(__doc__.splitlines()[0])
    main(sys.argv[1:])
