"""The rules of loss scale and gradients: silent over healthy runs of every shape, and loud where a fault is planted."""

import math
import random

import pytest
from reference.scale_runs import PARAMETERS, Run

from halfstep.watch.guard import all_rules
from halfstep.watch.settings import Watch

OWN = ("dead-gradient", "lost-updates", "nonfinite-gradients", "scale-collapse", "scale-floor", "skipped-steps")
WATCH = Watch(rules={name: False for name in all_rules() if name not in OWN})


def only(rule):
    return Watch(rules={name: False for name in all_rules() if name != rule})


def said(run):
    return [(alert.rule, alert.step, alert.message) for alert in run.alerts]


# --- healthy runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("power", "num_skipped", "num_late"),
    [(20, 5, 5), (15, 10, 9), (10, 15, 9), (5, 20, 9)],
    ids=lambda value: str(value),
)
def test_twenty_thousand_healthy_steps_never_alert(power, num_skipped, num_late):
    """The gradient overflows beyond 2^power: the scale falls to it, and tries the next one after 2000 clean steps."""
    run = Run(lambda step: 2.0**power, watch=WATCH).run(20_000)
    assert run.alerts == []
    assert run.reductions == []
    assert len(run.skipped) == num_skipped
    assert sum(step > 1000 for step in run.skipped) == num_late


@pytest.mark.parametrize(
    "options",
    [{"replay": True}, {"hysteresis": 2}, {"interval": 100}, {"init": 32.0, "interval": 40}, {"floor": 512.0}],
    ids=str,
)
def test_other_settings_of_a_healthy_scale_never_alert(options):
    run = Run(lambda step: 2.0**10, watch=WATCH, **options).run(5_000)
    assert run.alerts == []
    assert run.skipped or options.get("replay")


@pytest.mark.parametrize("replay", [False, True])
def test_gradients_of_uneven_size_alert_rarely(replay):
    """Each step's largest usable scale is 2^(15 +- 0.7): the level where it failed once fails again, in any step."""
    draw = random.Random(1)
    usable = [2.0 ** draw.gauss(15, 0.7) for _ in range(20_001)]
    run = Run(usable.__getitem__, replay=replay, watch=WATCH).run(20_000)
    assert len(run.alerts) == 1
    assert len(run.reductions) == 1


def test_resumed_in_the_step_of_a_growth():
    run = Run(lambda step: 2.0**16, watch=WATCH).run(2000)
    assert run.scale == 2.0**17
    run.see({"kind": "seam", "time": 0.0, "step": 2000})
    assert run.run(100).alerts == []
    assert run.skipped == [2001]


# --- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [20, 15, 10, 5])
@pytest.mark.parametrize("replay", [False, True])
def test_planted_faults_always_alert(power, replay):
    draw = random.Random(power)
    for _ in range(4):
        begin, share = draw.randrange(200, 1500), draw.choice([0.02, 0.3, 1.0])
        fault = lambda step: share * (begin <= step < begin + 10)  # noqa: E731, B023
        run = Run(lambda step: 2.0**power, fault=fault, replay=replay, watch=only("nonfinite-gradients")).run(
            begin + 30
        )
        assert run.alerts, (begin, share)
        assert begin <= run.alerts[0].step < begin + 10
        assert run.alerts[0].message.endswith(("lowers it once", "no more"))
        assert "in head, body.0," in run.alerts[0].message


def test_the_words_of_a_fault_that_the_scale_may_mend():
    run = Run(fault=lambda step: 0.3 * (step == 500), watch=WATCH).run(700)
    (alert,) = run.alerts
    assert alert.message == (
        "30 % of the gradient elements of step 500 were inf or NaN in head, body.0, with a finite loss, at a loss"
        " scale of 32768: the guard lowers it once"
    )
    assert run.reductions == [510]
    (alert,) = Run(fault=lambda step: 0.06 * (step in (500, 501)), watch=WATCH).run(700).alerts
    assert alert.message.startswith(
        "0.12 % of the gradient elements of 100 steps were inf or NaN in head, body.0, in 2 of them, with a finite loss"
    )


def test_below_the_limit_nothing_is_said():
    assert (
        Run(kind="none", fault=lambda step: 0.001 * (step % 2), watch=only("nonfinite-gradients")).run(500).alerts == []
    )
    run = Run(kind="none", fault=lambda step: 0.0021 * (step % 2), watch=only("nonfinite-gradients")).run(500)
    assert [alert.step for alert in run.alerts] == [1]  # where it began; said when it was more than 0.1 %


# --- skipped steps ---------------------------------------------------------------------------------------------------


def test_a_rare_term_that_is_always_skipped():
    """The overall rate is 6 %; the scale recovers between two of the heavy steps."""
    usable = lambda step: 2.0 ** (15 if step % 16 else 10)  # noqa: E731
    run = Run(usable, init=2.0**12, interval=12, watch=only("skipped-steps")).run(320)
    assert len(run.skipped) == 20
    (alert,) = run.alerts
    assert alert.message == (
        "every 16th step is skipped, the last 5 of them from step 16 to 80; the last one, step 80: the gradient norm is"
        " inf"
    )


@pytest.mark.parametrize(("kind", "period", "which"), [("none", 101, "101st"), ("static", 250, "250th")])
def test_the_last_batch_of_an_epoch(kind, period, which):
    fault = lambda step: 1.0 * (step % period == 0)  # noqa: E731
    run = Run(lambda step: 2.0**20, kind=kind, fault=fault, watch=only("skipped-steps")).run(6 * period)
    assert [alert.message.partition(",")[0] for alert in run.alerts] == [f"every {which} step is skipped"]


def test_a_rate_of_skipped_steps():
    draw = random.Random(0)
    for rate, num_alerts in ((0.02, 0), (0.12, 1)):
        fault = [1.0 * (draw.random() < rate) for _ in range(1001)]
        run = Run(kind="none", fault=fault.__getitem__, watch=only("skipped-steps")).run(1000)
        assert len(run.alerts) >= num_alerts
        assert bool(run.alerts) == bool(num_alerts)
    assert run.alerts[0].message.startswith("6 of the last 73 steps were skipped, without those by which")


# --- the scale -------------------------------------------------------------------------------------------------------


def test_a_scale_that_sits_at_its_floor():
    run = Run(lambda step: 2.0**15 if step < 300 else 1.5, watch=only("scale-floor"), interval=50).run(1000)
    (alert,) = run.alerts  # it tries 2 every 50 steps, and comes back: that is one and the same
    assert (alert.step, run.scale) == (334, 1.0)
    assert alert.message.startswith("the loss scale has been at its floor of 1 for 20 steps")


def test_a_scale_below_one():
    run = Run(lambda step: 0.25, watch=only("scale-floor"), floor=2.0**-10, init=4.0).run(200)
    assert [alert.message.partition(" for")[0] for alert in run.alerts] == ["the loss scale has been below 1, at 0.25,"]


@pytest.mark.parametrize(
    "options",
    [{"floor": 512.0, "init": 512.0}, {"init": 2.0}, {"kind": "none"}, {"kind": "static", "init": 0.5}],
    ids=str,
)
def test_a_scale_that_was_put_low_or_is_not_at_its_floor(options):
    assert Run(lambda step: 2.0**10, watch=only("scale-floor"), **options).run(200).alerts == []


def test_one_hard_batch_is_no_floor():
    run = Run(lambda step: 2.0**15 if step != 300 else 1.0, replay=True, interval=10, watch=only("scale-floor")).run(
        600
    )
    assert min(step.scale for step in run.guard.window.steps) >= 1.0
    assert run.alerts == []


@pytest.mark.parametrize("replay", [False, True])
def test_a_scale_that_collapses(replay):
    run = Run(lambda step: 2.0**15 if step < 300 else 2.0**9, replay=replay, watch=only("scale-collapse")).run(500)
    assert [(alert.step, alert.message.partition(" within")[0]) for alert in run.alerts] == [
        (300, "the loss scale fell from 32768 to 512") if replay else (305, "the loss scale fell from 32768 to 1024")
    ]


def test_a_scale_that_falls_slowly_or_finds_its_level_does_not_collapse():
    slow = lambda step: 2.0 ** (15 - step // 60)  # noqa: E731
    assert Run(slow, watch=only("scale-collapse")).run(600).alerts == []
    assert Run(lambda step: 2.0 ** (5 - (step > 40)), watch=only("scale-collapse")).run(100).alerts == []


# --- reports ---------------------------------------------------------------------------------------------------------


def updates(unmoved, below=None, modules=(), advice=""):
    rows = [{"module": name, "unmoved_pct": pct} for name, pct in modules]
    return {"kind": "updates", "time": 0.0, "step": 100, "unmoved_pct": unmoved, "advice": advice, "modules": rows,
            "below_half_ulp_pct": unmoved if below is None else below, "note": ""}  # fmt: skip


def see(entry, **options):
    run = Run(lambda step: 2.0**20, watch=WATCH, **options).run(1)
    run.see(entry)
    return run.alerts


def test_updates_that_are_lost():
    (alert,) = see(updates(69.0, modules=[("a", 23.0), ("head", 84.25), ("b", 1.0), ("", 2.0)]))
    assert alert.message == (
        "69 % of the weight updates of a sampled step moved no weight, most in head (84.2 %), a (23 %), the model"
        " itself (2 %) and 1 more"
    )
    assert see(updates(69.0, modules=[("a", 69.0)], advice="train with a master weight."))[0].action == (
        "train with a master weight."
    )


@pytest.mark.parametrize("entry", [updates(25.0), updates(None), {**updates(90.0), "below_half_ulp_pct": None}])
def test_updates_that_are_not(entry):
    assert see(entry) == []


def layers(number, norms):
    return {"kind": "layers", "time": 0.0, "step": number, "parameters": list(PARAMETERS), "norms": norms}


def watched(samples, **options):
    run = Run(lambda step: 2.0**20, watch=WATCH, **options)
    for i, norms in enumerate(samples):
        run.run(1)
        run.see(layers(100 * (i + 1), norms))
    return [(alert.step, alert.message) for alert in run.alerts]


def test_a_gradient_that_dies():
    assert watched([[1e-3, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.1, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]) == [
        (4, "the gradient of body.0.weight was exactly 0 in steps 200, 300, 400, while that of others was not")
    ]


@pytest.mark.parametrize(
    "samples",
    [
        [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]],  # too early to say
        [[0.0, 1.0, 1.0], [1e-30, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]],  # at rest at times
        [[0.0, 0.0, 0.0]] * 4,  # a loss that is constant
        [["NaN", "NaN", "NaN"]] * 4,
        [[1e-38, 1.0, 1.0]] * 4,
    ],
)
def test_gradients_that_are_alive_or_at_rest(samples):
    assert watched(samples) == []


def row(module, kind="gradient", meets=True, zero_pct=20.0, lost_sum_pct=1.0):
    return {"module": module, "kind": kind, "format": "fp16", "meets": meets, "zero_pct": zero_pct,
            "lost_sum_pct": lost_sum_pct}  # fmt: skip


def ranges(*rows, scale=1024.0, best=2.0**20):
    return {"kind": "ranges", "time": 0.0, "step": 1, "scale": scale, "best_scale": best, "modules": list(rows)}


def test_a_gradient_that_is_flushed_at_this_scale():
    (alert,) = see(ranges(row("a"), row("b", "weight gradient", zero_pct=60.0), row("c", meets=False)))
    assert alert.message == "fp16 flushes 60 % of the weight gradient of b to zero at a loss scale of 1024, and so in a"
    assert alert.action == "Raise the loss scale: 1.04858e+06 loses least of all gradients together."
    (alert,) = see(ranges(row("a"), best=1024.0))
    assert alert.action.startswith("No loss scale suits all gradients")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("a", "activation")],
        [row("a", "update")],
        [row("a", meets=False)],
        [row("a", zero_pct=1.0)],
        [row("a", lost_sum_pct=0.1)],  # many values, which hold nothing
    ],
)
def test_ranges_in_which_nothing_that_matters_is_flushed(rows):
    assert see(ranges(*rows)) == []


def test_the_ranges_of_a_real_step(tmp_path):
    torch = pytest.importorskip("torch")
    import halfstep
    from halfstep.explain import ranges_of

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.randn(16, 8)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp16 scale=static scale.init=1")
    loss = lambda: 1e-6 * (model(x).float() - 1).square().mean()  # noqa: E731
    stepper.step(loss)
    report = ranges_of(stepper.capture(loss))
    (alert,) = see({"kind": "ranges", "time": 0.0, **report.to_dict()}, kind="static", init=1.0)
    assert alert.rule == "dead-gradient"
    assert math.isfinite(report.best_scale)
    assert alert.action == f"Raise the loss scale: {report.best_scale:g} loses least of all gradients together."


# --- what a rule is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_a_rule_says_why(name):
    rule = all_rules()[name]
    assert rule.name == name
    assert rule.summary.endswith(".")
    assert len(rule.why) > 400
    assert rule.why.endswith(".\n")
    assert "—" not in rule.why
    assert all(len(line) <= 120 for line in rule.why.splitlines())
