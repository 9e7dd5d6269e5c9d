"""The four tasks of ``halfstep train`` by their defaults: a tiny model on built-in data, from the call to its end.

To reach: under three minutes each on two cores, with a loss that falls.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    for task in ("pretrain", "sft", "dpo", "kto"):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            call = [sys.executable, "-m", "halfstep", "train", task, "--output", "run", "--json", "report.json"]
            subprocess.run([*call, *sys.argv[1:]], cwd=folder, check=True, capture_output=True)
            seconds = time.perf_counter() - start
            report = json.loads((Path(folder) / "report.json").read_text())
        losses = f"loss {report['loss_first']:.3f} to {report['loss_last']:.3f}, {report['evaluation']:.3f} held out"
        steps = report["precision"]["num_steps"]
        print(f"  {task:8} {report['effective']}, {steps} steps: {losses}, {seconds:.0f} s of 180")
