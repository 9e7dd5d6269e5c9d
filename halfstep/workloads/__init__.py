"""Built-in workloads, which train on data found on any machine. ``halfstep.workload.load(name)`` loads one.

charlm:  a byte-level GPT on the source text of Python's standard library.
digits:  a convolutional net with BatchNorm on scikit-learn's handwritten digits.
mlp:     a two-layer network on a fixed teacher, done in a second.
fragile: a texture classifier that fp16 cannot train and bf16 can.
"""

from __future__ import annotations

BUILT_IN = {name: f"halfstep.workloads.{name}" for name in ("charlm", "digits", "mlp", "fragile")}
"""Name to module. Each defines ``workload(seed, **options)``, DEFAULT_STEPS and DEFAULT_SEEDS."""
