"""Training jobs over two ranks, as torchrun starts them: one report, one error, weights of one process."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow  # tests/test_integrations_accelerate_trainer.py has the mixin on ranks that stand already

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture
def run(tmp_path):
    rows = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(10) for b in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(output, *flags, ranks=2, **environment):
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        job = ["train", "sft", "--data", "sums.jsonl", "--device", "cpu", "--max-length", "32", "--output", output]
        return subprocess.run(
            [sys.executable, *start, "-m", "halfstep", *job, "--json", f"{output}.json", *flags],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return call


@pytest.mark.parametrize("engine", [{}, FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_two_ranks_train_what_one_process_does(run, tmp_path, engine, policy):
    flags = ("--policy", policy, "--steps", "4")
    assert run("one", *flags, "--batch", "8", ranks=1).returncode == 0
    two = run("two", *flags, "--batch", "4", **engine)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("sft: loss") == 1
    left, right = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert right["precision"] == left["precision"]
    # Sums over ranks round in another order; Adam's first steps have the size of the learning rate for any gradient.
    assert right["loss_last"] == pytest.approx(left["loss_last"], rel=1e-3)
    assert (tmp_path / "two" / "rank-00001.jsonl").is_file()
    weights = load_file(tmp_path / "two" / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert weights.keys() >= load_file(tmp_path / "one" / "model" / "model.safetensors").keys()


def test_what_is_wrong_is_said_once_and_ends_all(run, tmp_path):
    result = run("two", "--max-length", "2")
    lines = [line for line in result.stderr.splitlines() if line.startswith("halfstep: ")]
    assert len(lines) == 1
    assert "--max-length 2 leaves none for the answer" in lines[0]
    assert not (tmp_path / "two").exists()
