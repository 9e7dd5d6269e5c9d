"""Memory of the host while ``halfstep train`` loads a model, in bytes a parameter at the peak. For Linux.

A Llama of 163 million parameters is saved in bf16, in shards, and each row loads it in a fresh process and puts the
adapters (rank 4) or the reference on it. Printed are

own       peak of memory that is the process's own: what the machine must have
resident  peak of all that is in memory, with pages of the files, which the system takes back when it needs them
seconds   of loading

above what the process had before; once as ``halfstep train`` loads, once with all in fp32 first and narrowed after it.
To reach: 4 for fp32; 0 for --lora in the file's own format, which stays in the mapped file until it moves to a device,
and 2 in another; 0.66 for --quantize 4bit (0.5625 a weight of the blocks, 2 one of the embeddings) and one matrix in
fp32 (0.07 here); 6 for a DPO with its 16-bit reference.

    python benchmarks/loading.py
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "all weights train": ("sft", {}),
    "--lora": ("sft", {"lora": True}),
    "--lora --policy fp16": ("sft", {"lora": True, "policy": "fp16"}),
    "--lora --quantize 4bit": ("sft", {"lora": True, "quantize": "4bit"}),
    "dpo, all weights train": ("dpo", {}),
}
"""Task and settings; the policy is bf16 where none is given."""


def make_base(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfstep.train import tiny

    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=16)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="64MB")
    tiny.tokenizer(["one two three"]).save_pretrained(folder)


class Peak:
    """Peaks of the process's own memory and of all that is resident, in bytes above those at the start."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
        self._base = self._read()
        self.own, self._is_open = 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False
        self._thread.join()
        self.resident = self._read()["VmHWM"] - self._base["VmRSS"]

    def _watch(self) -> None:
        while self._is_open:
            self.own = max(self.own, self._read()["RssAnon"] - self._base["RssAnon"])
            time.sleep(0.001)

    def _read(self) -> dict[str, int]:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[0] in ("VmHWM:", "VmRSS:", "RssAnon:")}


def row(name: str, folder: str, is_narrowed_after: bool) -> dict[str, float]:
    import torch

    from halfstep.plan.quantized import hold_base_in_16_bit
    from halfstep.policy import Policy
    from halfstep.train.adapters import adapt
    from halfstep.train.dataset import read
    from halfstep.train.four_bit import check_kernels
    from halfstep.train.held import Held
    from halfstep.train.pretrained import find
    from halfstep.train.quiet import quieten
    from halfstep.train.settings import Settings

    quieten()
    task, given = ROWS[name]
    settings = Settings(task, **{"policy": "bf16", "model": folder, "lora_rank": 4, "device": "cpu"} | given)
    policy = Policy.parse(settings.policy)
    pretrained = find(folder, read(task, "builtin"))
    check_kernels("cpu")
    adapt(torch.nn.Linear(1, 1), Settings("sft"), policy)
    with Peak() as peak:
        start = time.perf_counter()
        model = pretrained.load(None if is_narrowed_after else Held.by(settings, policy, "cpu"))
        if task == "dpo" and is_narrowed_after:
            reference = copy.deepcopy(model).requires_grad_(False)
            hold_base_in_16_bit(reference, policy)
        else:
            adapted = adapt(model, settings, policy)  # noqa: F841
        seconds = time.perf_counter() - start
    num = pretrained.num_parameters
    return {"own": peak.own / num, "resident": peak.resident / num, "seconds": seconds}


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(row(sys.argv[1], sys.argv[2], sys.argv[3] == "after")))
        return
    print(__doc__.splitlines()[0])
    print(f"  {'':24} {'own':>6} {'resident':>9} {'seconds':>8}   narrowed after: own, resident, seconds")
    with tempfile.TemporaryDirectory() as folder:
        make_base(folder)
        for name in ROWS:
            figures = []
            for way in ("at once", "after"):
                call = [sys.executable, __file__, name, folder, way]
                done = subprocess.run(call, check=True, capture_output=True, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                figures.append(f"{found['own']:6.2f} {found['resident']:9.2f} {found['seconds']:8.1f}")
            print(f"  {name:24} {figures[0]}   {figures[1]}", flush=True)


if __name__ == "__main__":
    main()
