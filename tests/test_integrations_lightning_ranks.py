"""DDP under Lightning: two ranks train as one process does on all the data, and skip in the same step."""

import warnings

import pytest
import torch
from lightning import Fabric, Trainer
from reference.lightning_net import FILTERS, QUIET, Net, body, data, loss_of, weights
from test_integrations_lightning_manual import Gan, Manual
from torch.utils.data import DataLoader, DistributedSampler

from halfstep import StepReport
from halfstep.integrations.lightning import Precision

pytestmark = [pytest.mark.usefixtures("kernels_stay"), *map(pytest.mark.filterwarnings, FILTERS)]

FP16 = "fp16 on_overflow=skip"


def train(policy, loop, num, log=None):
    """Weights, reports, and whether this rank is rank 0."""
    warnings.simplefilter("ignore")
    rank = torch.distributed.get_rank() if num > 1 else 0
    events = []
    plugin = Precision(policy, sinks=[events.append], log=log)
    rows = data(60).dataset
    # Ranks take turns at the rows, so that two batches of 5 are one of 10.
    loader = DataLoader(rows, 10 // num, sampler=DistributedSampler(rows, num, rank, shuffle=False))
    factors = {3: 1e6} if policy == FP16 else {}
    if loop == "fabric":
        fabric = Fabric(accelerator="cpu", devices=num, strategy="ddp" if num > 1 else "auto", plugins=plugin)
        fabric.launch()
        module = body()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        for i, batch in enumerate(loader):
            is_last = i % 2 == 1
            with fabric.no_backward_sync(model, enabled=num > 1 and not is_last):
                fabric.backward(loss_of(model, batch, factors.get(i, 1.0)) / 2)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
        plugin.teardown()
    else:
        kinds = {"automatic": Net, "manual": Manual, "gan": Gan}
        module = kinds[loop](**({} if loop == "gan" else {"fused": False, "factors": factors}))
        whole = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3} if loop == "automatic" else {}
        ddp = "ddp_find_unused_parameters_true" if loop == "gan" else "ddp"
        settings = {**QUIET, **whole, "devices": num, "strategy": ddp if num > 1 else "auto"}
        trainer = Trainer(
            plugins=plugin, max_epochs=1, enable_checkpointing=False, use_distributed_sampler=False, **settings
        )
        trainer.fit(module, loader)
    reports = [event.to_dict() for event in events if isinstance(event, StepReport)]
    return weights(module), reports


CASES = [
    ("fp32", "automatic"),
    ("bf16", "automatic"),
    (FP16, "automatic"),
    (FP16, "manual"),
    ("fp32", "gan"),
    (FP16, "fabric"),
]


@pytest.mark.parametrize(("policy", "loop"), CASES)
def test_two_ranks_train_as_one_process_on_all_the_data(world2, policy, loop):
    own, reports = train(policy, loop, 1)
    ranks = world2.run(train, policy, loop, 2)
    assert torch.equal(ranks[0][0], ranks[1][0])
    # The sum over a batch is taken in two halves: fp32 rounds it otherwise in the last place, and 16 bit in its own;
    # Adam makes of that lr x its relative size in each step, and of a small element a few times as much.
    eps = {"fp32": 1e-6, "bf16": 2.0**-8, FP16: 2.0**-11}[policy]
    torch.testing.assert_close(ranks[0][0], own, rtol=0, atol=10 * eps * 1e-2 * len(reports))
    for theirs in (ranks[0][1], ranks[1][1]):
        for name in ("step", "applied", "scale"):
            assert [report[name] for report in theirs] == [report[name] for report in reports]
        if loop != "fabric":  # which does not say who the others are, so that a rank reports its own loss
            losses = [report["loss"] for report in theirs]
            assert losses == pytest.approx([report["loss"] for report in reports], rel=10 * eps)
    assert (sum(not report["applied"] for report in reports) == 1) == (policy == FP16)


def test_ranks_of_fabric_write_one_log(world2, tmp_path):
    world2.run(train, "bf16", "fabric", 2, str(tmp_path / "run"))
    logs = [path for path in tmp_path.rglob("*") if path.is_file() and "grad_norm" in path.read_text()]
    assert sum(path.read_text().count('"grad_norm"') for path in logs) == 3
