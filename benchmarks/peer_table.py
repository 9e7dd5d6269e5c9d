"""Known faults of mixed-precision loops on torch.amp, Fabric, Accelerate and halfstep: the table of docs/peers.md.

    pip install lightning-fabric accelerate
    python benchmarks/peer_table.py

It runs what tests/peers/ tests. The column of a library that is not installed says so.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from peers.columns import NEEDS, version_of
from peers.table import lines

if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n".join(lines()))
    versions = ", ".join(f"{package} {version_of(column)}" for column, package in NEEDS.items())
    print(f"\n{date.today()}, on a CPU: {versions}")
