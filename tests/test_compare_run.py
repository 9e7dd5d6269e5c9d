"""Training under several policies: the same start, data and bits; what is measured; what a failure leaves."""

import math

import pytest
import torch
from torch import nn

from halfstep.compare import compare
from halfstep.compare.memory import LiveBytes
from halfstep.compare.run import live_mib, run_trial
from halfstep.errors import HalfstepError
from halfstep.source import Source, load
from halfstep.workload import Workload

CPU = "cpu"


def test_the_same_call_gives_the_same_losses_to_the_bit():
    first, again = (run_trial(load("mlp"), "fp16", 1, 8, CPU) for _ in range(2))
    assert first.losses == again.losses
    assert first.evaluated == again.evaluated
    other = run_trial(load("mlp"), "fp16", 2, 8, CPU)
    assert other.losses != first.losses


def test_policies_start_from_the_same_weights_and_data():
    fp32, bf16 = (run_trial(load("mlp"), policy, 0, 3, CPU) for policy in ("fp32", "bf16"))
    # One bf16 rounding is 2^-9; the first loss has seen the same weights and the same batch through few of them.
    assert bf16.losses[0] == pytest.approx(fp32.losses[0], rel=2**-5)
    assert bf16.losses[0] != fp32.losses[0]


def test_report_of_three_policies():
    report, trials = compare(load("mlp"), ["fp32", "bf16", "fp16"], steps=6, seeds=3)
    assert [(t.policy, t.seed) for t in trials] == [(p, s) for s in range(3) for p in ("fp32", "bf16", "fp16")]
    assert report.policies[0].verdict.word == "reference"
    assert all(p.steps_applied == 18 and p.steps_skipped == 0 for p in report.policies)
    assert report.policies[2].scale_last == 65536
    assert all(t.samples_per_s > 0 for t in trials)


def test_fragile_diverges_in_fp16_alone_and_is_mended_by_the_module_it_names():
    report, trials = compare(load("fragile"), ["fp32", "bf16", "fp16", "fp16 module:pool=fp32"], steps=20, seeds=1)
    by_policy = {trial.policy: trial for trial in trials}
    assert "module:pool=fp32" in by_policy["fp16"].stopped
    assert "pool makes it (inf) in the forward pass" in by_policy["fp16"].stopped
    assert math.isnan(by_policy["fp16"].final_loss)
    for healthy in ("fp32", "bf16", "fp16 module:pool=fp32"):
        assert by_policy[healthy].stopped is None
        assert math.isfinite(by_policy[healthy].final_loss)
    assert report.found


def test_promotion_lets_fragile_train_to_the_end():
    trial = run_trial(load("fragile"), "fp16 on_exhausted=promote", 0, 30, CPU)
    assert trial.stopped is None
    assert "module:pool=fp32" in trial.effective
    assert trial.applied[-1]
    assert trial.losses[-1] < 2.2  # 2.08 = log 8 classes is a guess


def test_interrupt_keeps_what_has_ended():
    calls = 0

    def stop(policy, seed):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    report, trials = compare(load("mlp"), ["fp32", "bf16"], steps=2, seeds=4, progress=stop)
    assert len(trials) == 2
    assert report.interrupted
    assert report.to_dict()["interrupted"] is True

    def stop_at_once(policy, seed):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(load("mlp"), ["fp32"], steps=2, seeds=2, progress=stop_at_once)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ["fp32"], "steps": 0, "seeds": 1}, "steps=0"),
        ({"policies": ["fp32"], "steps": 1, "seeds": 0}, "seeds=0"),
        ({"policies": [], "steps": 1, "seeds": 1}, "no policies"),
        ({"policies": ["fp32", "tf32"], "steps": 1, "seeds": 1}, "cannot compute tf32"),
    ],
)
def test_wrong_calls_are_refused_before_anything_runs(arguments, message):
    def never(seed):
        raise AssertionError("nothing may run")

    with pytest.raises(HalfstepError, match=message):
        compare(Source("never", never), **arguments)


def test_live_bytes_follow_a_storage_from_birth_to_death():
    with LiveBytes() as live:
        a = torch.ones(1000)  # 4000 bytes
        b = a.view(10, 100)  # the same storage
        assert live.now == 4000
        c = a + 1
        assert live.now == live.peak == 8000
        del a
        assert live.now == 8000  # the view holds it
        del b
        assert live.now == 4000
        del c
    assert live.now == 0
    assert live.peak == 8000


def test_live_mib_has_a_closed_form():
    """One linear layer without bias, plain SGD: at the peak its weight and gradient are live, and the output's."""

    def workload(seed):
        model = nn.Linear(512, 256, bias=False)
        return Workload(
            model=model,
            batches=[torch.ones(64, 512)],
            loss=lambda model, batch: model(batch).sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        )

    weight, output = 512 * 256 * 4, 64 * 256 * 4
    peak = live_mib(Source("one layer", workload), "fp32", CPU) * 2**20
    # The batch was there before and no operation made it. In backward the gradient of the output, one number expanded
    # and then made dense for the product, meets the weight's gradient; a dozen scalars besides.
    assert 2 * weight <= peak <= 2 * weight + 2 * output + 256


def test_sixteen_bit_saves_activations():
    assert live_mib(load("charlm"), "bf16", CPU) < 0.85 * live_mib(load("charlm"), "fp32", CPU)
