"""Techniques by name: what each changes of a workload and a policy, and what they refuse."""

import pytest
import torch
from reference.stack_nets import BLOCK_WEIGHTS, DEPTH, INNER, NUM_PARAMETERS, VOCABULARY, WIDTH, llama, plain, traced
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.plan.classic_case import largest
from halfstep.plan.prices import KINDS
from halfstep.plan.technique import in_form, technique_of
from halfstep.policy import Policy

pytestmark = pytest.mark.usefixtures("kernels_stay")
BF16 = Policy.parse("bf16")


def apply(name, workload=None, policy=BF16):
    return technique_of(name).apply(llama(0) if workload is None else workload, policy)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_name_is_a_technique_and_keeps_its_name(kind):
    workload = llama(0)
    if kind.needs:
        workload, _ = apply("lora=2", workload)
    changed, policy = technique_of(kind.example).apply(workload, BF16)
    assert technique_of(kind.example).name == kind.example
    assert (changed is not workload) or (policy != BF16) or kind.group in CHANGES_MODEL


CHANGES_MODEL = {"checkpointing", "adapter", "base in 16 bit", "base in 4 bit"}


@pytest.mark.parametrize("layout", ["split16", "split8"])
def test_masters_are_a_policy(layout):
    workload = llama(0)
    assert apply(layout, workload) == (workload, Policy.parse(f"bf16 master={layout}"))
    with pytest.raises(HalfstepError, match=f"fp32 master={layout}"):
        apply(layout, policy=Policy.parse("fp32"))


def test_accumulation_multiplies_the_window():
    once, _ = apply("accumulate=3")
    twice, _ = apply("accumulate=2", once)
    assert (once.accumulate, twice.accumulate) == (3, 6)


@pytest.mark.parametrize(
    ("form", "settings"),
    [("fused", (True, False)), ("foreach", (False, True)), ("loop", (False, False))],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_forms_of_an_optimizer_keep_its_groups(form, settings, kind):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}]
    made = in_form(kind(groups, lr=0.25, weight_decay=0.125, foreach=True), form)
    assert type(made) is kind
    assert [(g["lr"], g["weight_decay"]) for g in made.param_groups] == [(0.5, 0.125), (0.25, 0.125)]
    assert [(g["fused"], g["foreach"]) for g in made.param_groups] == [settings] * 2
    assert bool(getattr(made, "_step_supports_amp_scaling", False)) == (form == "fused")
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    made.step()
    assert all((p < 1).all() for p in parameters)


def test_an_optimizer_without_the_form_is_refused():
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(HalfstepError, match=r"optimizer RMSprop with fused: it has no such form \(it has foreach\)"):
        in_form(torch.optim.RMSprop(parameters), "fused")
    with pytest.raises(HalfstepError, match="optimizer LBFGS with loop: it has no such form, nor any other"):
        in_form(torch.optim.LBFGS(parameters), "loop")
    assert not in_form(torch.optim.RMSprop(parameters), "loop").param_groups[0]["foreach"]


def test_casts_without_the_cache_leave_it_as_they_found_it():
    seen = []
    workload = plain(0)
    object.__setattr__(workload, "loss", lambda model, batch: seen.append(torch.is_autocast_cache_enabled()))
    changed, _ = apply("uncached", workload)
    changed.loss(None, None)
    assert seen == [False]
    assert torch.is_autocast_cache_enabled()


def largest_in_forward(trace, component):
    """The most bytes that a component holds in the last forward phase."""
    at = max(index for index, (phase, _) in enumerate(trace.phases) if phase == "forward")
    start, end = trace.phases[at][1], trace.phases[at + 1][1]
    return max(trace.at(time).components.get(component, 0) for time in range(start, end))


@pytest.mark.slow
def test_with_checkpointing_the_cache_is_what_keeps_casts():
    kept = largest_in_forward(traced("llama", "bf16", "checkpointing"), "16-bit weights")
    uncached = largest_in_forward(traced("llama", "bf16", "checkpointing", "uncached"), "16-bit weights")
    assert kept == 2 * (DEPTH * BLOCK_WEIGHTS + VOCABULARY * WIDTH)
    assert uncached == 2 * max(WIDTH * INNER, VOCABULARY * WIDTH)  # one at a time


@pytest.mark.slow
def test_forms_differ_in_the_temporaries_of_the_step():
    # foreach makes one list as large as all weights: 4 bytes each. fused makes none.
    assert largest(traced("llama", "fp32", "foreach"), "step temporaries") >= 4 * NUM_PARAMETERS
    assert largest(traced("llama", "fp32", "fused"), "step temporaries") < 4096
