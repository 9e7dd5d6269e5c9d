"""What AMP, checkpointing, LoRA, 8-bit states, 4-bit weights and split16 save, alone and stacked: planned, measured.

Each row is a whole ``halfstep train sft`` on the built-in examples, from one base: a Llama of 3.4 million parameters
that was trained on text before, in fp32, so that adapters have something to adapt. Printed are

planned    peak of the tensors of a step, by ``halfstep train --plan``, for the batch of the measured step
measured   peak of the live tensors (halfstep/compare/memory.py) of the real trainer's fourth step on this CPU
ratio      planned / measured. To reach: 1
of fp32    what the row needs of what fp32 needs, planned and measured: where both agree, so do the savings
loss       on what was held out, after the steps

    python benchmarks/stacking.py                  100 steps each
    python benchmarks/stacking.py --quick          memory alone
    python benchmarks/stacking.py --only lora      rows whose name contains this

Memory and losses do not depend on the load of the machine. Rows run in processes of their own, two at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MEASURED_STEP = 4
BATCH, RATE, LORA_RATE = 4, 1e-3, 3e-3

CHECKPOINTING = {"checkpointing": True}
EIGHT = {"optimizer": "adamw8bit"}
LORA: dict[str, Any] = {"lora": True, "lr": LORA_RATE}
FOUR = LORA | {"quantize": "4bit"}
SPLIT = {"policy": "bf16 master=split16"}

ROWS: dict[str, dict[str, Any]] = {
    "fp32": {"policy": "fp32"},
    "AMP (bf16)": {},
    "AMP (fp16)": {"policy": "fp16"},
    "checkpointing": CHECKPOINTING,
    "split16": SPLIT,
    "8-bit states": EIGHT,
    "lora": LORA,
    "lora, 4-bit weights": FOUR,
    "checkpointing, split16": CHECKPOINTING | SPLIT,
    "checkpointing, 8-bit states": CHECKPOINTING | EIGHT,
    "split16, 8-bit states": SPLIT | EIGHT,
    "checkpointing, split16, 8-bit states": CHECKPOINTING | SPLIT | EIGHT,
    "lora, checkpointing": LORA | CHECKPOINTING,
    "lora, 4-bit weights, checkpointing": FOUR | CHECKPOINTING,
    "lora, 4-bit weights, checkpointing, 8-bit states": FOUR | CHECKPOINTING | EIGHT,
}
"""Settings of halfstep train, on top of bf16."""


def settings_of(name: str, base: str, steps: int, output: str) -> Any:
    from halfstep.train.settings import Settings

    given = {"policy": "bf16", "lr": RATE} | ROWS[name]
    return Settings("sft", model=base, output=output, steps=steps, batch=BATCH, max_length=128, device="cpu", **given)


def make_base(folder: str, steps: int) -> str:
    """A model that was trained on text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfstep.train import tiny
    from halfstep.train.dataset import read
    from halfstep.train.run import train
    from halfstep.train.settings import Settings

    words = tiny.tokenizer(read("sft", "builtin").texts())
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(f"{folder}/new")
    words.save_pretrained(f"{folder}/new")
    train(
        Settings(
            "pretrain", model=f"{folder}/new", output=f"{folder}/base", policy="fp32", steps=steps, batch=BATCH,
            max_length=128, lr=RATE, device="cpu",
        )
    )  # fmt: skip
    return f"{folder}/base/model"


def row(name: str, base: str, steps: int) -> dict[str, Any]:
    """Runs in a process of its own."""
    from unittest.mock import patch

    import torch
    from transformers import TrainerCallback

    from halfstep.compare.memory import LiveBytes
    from halfstep.hardware import detect
    from halfstep.plan.measure import target_on
    from halfstep.plan.worker import Call, Workers
    from halfstep.policy import Policy
    from halfstep.train import run
    from halfstep.train.planned import job_of
    from halfstep.train.quiet import quieten

    quieten()
    torch.set_num_threads(1)
    live, found = LiveBytes(), {}

    class Measure(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gc.collect()
            live.peak = live.now

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == MEASURED_STEP:
                found["measured"] = live.peak

    shapes: list[tuple[int, ...]] = []
    models: list[Any] = []
    adapt, make = run.adapt, run.make_trainer

    def adapted(model: Any, *args: Any) -> Any:
        models.append(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # those of a file share its memory, which nobody made
        return adapt(model, *args)

    def made(*args: Any) -> Any:
        trainer = make(*args)
        trainer.add_callback(Measure())
        collate = trainer.data_collator

        def collated(examples: Any) -> Any:
            batch = collate(examples)
            shapes.append(tuple(batch["input_ids"].shape))
            return batch

        trainer.data_collator = collated
        return trainer

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(name, base, MEASURED_STEP, f"{folder}/memory")
        gc.disable()  # else the moment at which cycles free their tensors would depend on the machine
        with patch.object(run, "adapt", adapted), patch.object(run, "make_trainer", made), live:
            run.train(settings)
        gc.enable()
        length = shapes[MEASURED_STEP - 1][1]
        job = job_of(settings, models.pop(), Policy.parse(settings.policy), length)
        with Workers(1) as workers:
            (trace,) = workers.run([Call("halfstep.train.planned_step:job_step", (job, target_on(detect("cpu"))))])
        if isinstance(trace, Exception):
            raise trace
        found |= {"planned": trace.peak.nbytes, "length": length, "components": dict(trace.peak.components)}
        if steps:
            found["loss"] = run.train(settings_of(name, base, steps, f"{folder}/loss")).evaluation
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What techniques save, planned and measured.")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="memory alone")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--base", help="a base that was made before; made anew without it")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        name, base, steps = arguments.row
        print(json.dumps(row(name, base, int(steps))))
        return
    steps = 0 if arguments.quick else arguments.steps
    names = [name for name in ROWS if arguments.only in name]
    with tempfile.TemporaryDirectory() as folder:
        base = arguments.base or make_base(folder, 10 if arguments.quick else 200)

        def run(name: str) -> dict[str, Any]:
            command = [sys.executable, __file__, "--row", name, base, str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
            print(f"{name} has ended", file=sys.stderr, flush=True)
            return dict(json.loads(done.stdout.splitlines()[-1]))

        with ThreadPoolExecutor(2) as pool:
            figures = dict(zip(names, pool.map(run, names), strict=True))
    first = next(iter(figures.values()))
    print(f"{'':50}{'planned':>9}{'measured':>10}{'ratio':>8}{'of fp32, planned':>18}{'measured':>10}{'loss':>8}")
    for name, each in figures.items():
        planned, measured = each["planned"], each["measured"]
        shares = f"{planned / first['planned']:18.0%}{measured / first['measured']:10.0%}"
        loss = f"{each['loss']:8.3f}" if "loss" in each else ""
        print(f"{name:50}{planned / 2**20:9.2f}{measured / 2**20:10.2f}{planned / measured:8.3f}{shares}{loss}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
