"""Healthy runs are never stopped, whatever their ranks do alone; comparisons come when the page says, and cost that."""

import pytest
import torch
from reference.contract import flip, make, stopped
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep import Contract, HalfstepError, Stepper
from halfstep.ranks.contract import TOPICS, Comparison
from halfstep.ranks.facts import Fact

HEALTHY = {
    "bf16": ("ddp", {}),
    "fp16 with replay": ("ddp", {"policy": "fp16 scale.interval=5", "accumulate": 2}),
    "fp16 without": ("ddp", {"policy": "fp16 on_overflow=skip scale.interval=5"}),
    "split16": ("ddp", {"policy": "bf16 master=split16", "accumulate": 2}),
    "split16 in fp16": ("ddp", {"policy": "fp16 master=split16 scale.interval=5"}),
    "stochastic": ("ddp", {"policy": "bf16 master=stochastic", "max_norm": 0.1}),
    "bf16 on the wire": ("ddp", {"wire": "bf16", "schedule": True}),
    "shards": ("fsdp", {"policy": "bf16", "max_norm": 0.1}),
    "shards in fp16": ("fsdp", {"policy": "fp16 scale.interval=5"}),
}


def long_run(case, num_steps, every):
    """Each rank has data of its own, and spikes that overflow fp16 in micro-batches of its own."""
    engine, kwargs = HEALTHY[case]
    model, optimizer, kwargs = make(engine, lr=0.01, **kwargs)
    if engine == "fsdp":
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepper = Stepper(model, optimizer, contract=Contract(every=every), **kwargs)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    reports = []
    for _ in range(num_steps * stepper.accumulate):
        x = torch.randn(3, 4, generator=generator)
        spike = 30.0 if torch.rand((), generator=generator) < 0.1 else 1.0
        reports.append(stepper.step(lambda x=x, spike=spike: ((model(x).square() * spike).sum(), 12)))
    reports = [report for report in reports if report]
    return len(reports), sum(not report.applied or report.num_replays for report in reports)


def check_healthy(world2, case, num_steps):
    """Compared before every fifth step."""
    runs = world2.run(long_run, case, num_steps, 5)
    assert [num for num, _ in runs] == [num_steps] * 2
    assert (sum(num_bad for _, num_bad in runs) > 0) == ("fp16" in case)


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_of_200_steps_is_never_stopped(world2, case):
    check_healthy(world2, case, 200)


@pytest.mark.parametrize("case", ["fp16 with replay", "stochastic", "shards"])
def test_a_healthy_run_is_not_stopped(world2, case):
    check_healthy(world2, case, 40)


def moments(every):
    """In which steps ranks compare, and how many collectives of how many bytes that takes."""
    model, optimizer, kwargs = make()
    stepper = Stepper(model, optimizer, contract=Contract(every=every), **kwargs)
    sent, found = [], []
    highest = stepper.ranks.highest
    stepper.ranks.highest = lambda numbers: sent.append(numbers.nbytes) or highest(numbers)
    for step in range(10):
        stepper.step(lambda: model(torch.ones(1, 4)).square().mean())
        if sent:
            found.append(step)
            assert len(sent) == 1
            assert sent.pop() == 32 * NUM_FACTS
    return found


NUM_FACTS = 15


@pytest.mark.parametrize(("every", "steps"), [(1, list(range(10))), (4, [0, 4, 8]), (100, [0])])
def test_ranks_compare_in_the_first_step_and_after_every_so_many(world2, every, steps):
    assert world2.run(moments, every) == [steps, steps]


def seen_at(every, element, bit):
    model, optimizer, kwargs = make()
    stepper = Stepper(model, optimizer, contract=Contract(every=every), **kwargs)
    for step in range(20):
        if step == 5 and torch.distributed.get_rank() == 1:
            flip(model.module[0].weight, element, bit)
        if stopped(lambda: stepper.step(lambda: model(torch.ones(1, 4)).square().mean())):
            return step
    return None


@pytest.mark.parametrize(("every", "at"), [(1, 5), (3, 6), (7, 7)])
def test_a_flipped_bit_is_seen_at_the_next_comparison(world2, every, at):
    """Whichever it is: the last place of one element, the sign of another, in odd and even places."""
    for element, bit in [(0, 12), (31, 31), (17, 22)]:
        assert world2.run(seen_at, every, element, bit) == [at, at]


def flushing():
    """Windows that end early, at another micro-batch on each rank, one without any on rank 1; compared in each."""
    rank = torch.distributed.get_rank()
    model, optimizer, kwargs = make(accumulate=3, contract=Contract(every=1))
    stepper = Stepper(model, optimizer, **kwargs)
    for num in ((2, 0), (0, 1), (1, 1), (0, 0), (2, 1)):
        for _ in range(num[rank]):
            assert stepper.step(lambda: model(torch.ones(1, 4)).square().mean()) is None
        assert (stepper.flush() is None) == (num == (0, 0))
    return stepper.num_steps


def test_a_rank_that_only_flushes_takes_part(world2):
    assert world2.run(flushing) == [4, 4]


def test_in_one_process_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(Fact, "digest", lambda fact: pytest.fail("a digest"))
    model, optimizer, kwargs = make(None)
    stepper = Stepper(model, optimizer, contract=Contract(every=1), **kwargs)
    for _ in range(3):
        stepper.step(lambda: model(torch.ones(1, 4)).square().mean())


def not_read():
    """What a comparison reads from the device."""
    from reference.reads import Reads

    from halfstep.stepper.facts import facts_of

    model, optimizer, kwargs = make(policy="fp16 on_overflow=skip")
    stepper = Stepper(model, optimizer, **kwargs)
    facts = [*facts_of(stepper), Fact("weights", tensors={"holds parameter x": torch.ones(3)})]
    with Reads() as reads:
        digests = [fact.digest() for fact in facts]
    with Reads() as reads_of_all:
        stepper._comparison.check(facts)
    return reads.num_reads, reads_of_all.num_reads, len(digests)


def test_a_comparison_reads_once(world2):
    for of_digests, of_all, num_digests in world2.run(not_read):
        assert num_digests
        assert (of_digests, of_all) == (0, 1)


def gradients_that_differ():
    rank = torch.distributed.get_rank()
    stepper = Stepper(*make()[:2], **make()[2])
    facts = [Fact("gradients", {"has the gradient of w": "in fp32" if rank else "in bf16"})]
    return stopped(lambda: Comparison(stepper.ranks, Contract(), "a card", False).check(facts))


def test_formats_of_gradients_that_differ_are_named(world2):
    text = "rank 1 has the gradient of w in fp32, rank 0 in bf16: "
    assert all(each.startswith(text) for each in world2.run(gradients_that_differ))


@pytest.mark.parametrize(
    "kwargs", [{"every": 0}, {"every": 1.5}, {"allow": "device"}, {"allow": ("policy",)}, {"allow": ["torch"]}]
)
def test_a_contract_that_makes_no_sense_is_refused(kwargs):
    with pytest.raises(HalfstepError, match="Use "):
        Contract(**kwargs)


def test_what_is_no_contract_is_refused():
    model, optimizer, kwargs = make(None)
    with pytest.raises(HalfstepError, match="contract=100: it is a"):
        halfstep.Stepper(model, optimizer, contract=100, **kwargs)


def test_every_topic_has_a_row_on_the_page():
    from pathlib import Path

    page = (Path(__file__).parent.parent / "docs" / "contract.md").read_text()
    for topic in TOPICS:
        assert f"| {topic} |" in page, topic
