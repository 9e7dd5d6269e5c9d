"""Casting for inference: weights that a format cannot hold, and what is refused with the model left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from reference.inference_nets import IMAGE, ResNet, build
from reference.nets import CPU, FP16, FULL, NAMES, Net, Seen
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.inference import cast_for_inference
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


# ---- what a format cannot hold


def test_a_weight_beyond_fp16_is_refused_by_name_and_nothing_is_changed():
    model = build(Net)
    model.head.linear.weight.data[1, 2], model.head.linear.weight.data[0, 0] = -65520.0, 1e9
    model.stem.linear.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HalfstepError) as caught:
        cast_for_inference(model, "fp16", hardware=CPU)
    assert caught.value.what == "head.linear.weight in fp16"
    assert caught.value.why == "2 of its elements, up to 1e+09, are beyond 65504 and would become inf"
    assert "keep=['head.linear.weight']" in caught.value.fix
    assert all(value.dtype == FULL and torch.equal(value, before[n]) for n, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.stem.linear.weight.grad is not None
    assert "forward" not in model.__dict__
    cast_for_inference(model, "fp16", keep=["head.linear.weight"], hardware=CPU)
    assert cast_for_inference(model, "bf16", hardware=CPU).cast["head.linear.weight"] == "bf16"


def test_the_largest_weight_that_fits_and_what_is_not_finite_already():
    model = nn.Linear(4, 1, bias=False).eval()
    model.weight.data = torch.tensor([[65519.996, -65504.0, float("inf"), float("nan")]])
    cast_for_inference(model, "fp16", hardware=CPU)
    assert model.weight[0, :3].tolist() == [65504.0, -65504.0, float("inf")]
    assert model.weight[0, 3].isnan()
    model = nn.Linear(1, 1, bias=False).eval()
    model.weight.data = torch.tensor([[3.4e38]])
    with pytest.raises(HalfstepError, match="weight in bf16"):
        cast_for_inference(model, "bf16", hardware=CPU)


def test_weights_that_round_to_zero_are_counted():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2)).eval()
    model[0].weight.data = torch.tensor([[2.0**-25, -(2.0**-26), 0.0, 2.0**-24], [1.0, float("nan"), -1e-20, 3.1e-8]])
    report = cast_for_inference(copy.deepcopy(model), "fp16", hardware=CPU)
    assert report.underflow == {"0.weight": 3}  # half the smallest subnormal and less: 2^-25, 2^-26, 1e-20
    assert "rounded to zero  0.weight 3" in str(report)
    report = cast_for_inference(model, "bf16", hardware=CPU)
    assert report.underflow == {}
    assert "rounded to zero" not in str(report)


def test_a_model_that_is_in_16_bit_already():
    model = build(ResNet).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = cast_for_inference(model, "fp16 module:head=fp32", hardware=CPU)
    assert report.converted == ("stem.weight", "conv.weight")
    assert "rounded twice  stem.weight, conv.weight" in str(report)
    assert report.kept["head.weight"] == "a module rule keeps it in fp32, widened from bf16"
    for name, value in model.state_dict().items():
        expected = FP16 if name in report.cast else before[name].dtype if "batches" in name else FULL
        assert value.dtype == expected, name
        assert torch.equal(value.float(), before[name].to(expected).float())
    assert model(IMAGE)["logits"].isfinite().all()
    large = nn.Linear(1, 1).bfloat16().eval()
    large.weight.data.fill_(1e6)
    with pytest.raises(HalfstepError, match="beyond 65504"):
        cast_for_inference(large, "fp16", hardware=CPU)
    same = nn.Linear(4, 4).half().eval()
    weight = same.weight.data_ptr()
    report = cast_for_inference(same, "fp16", hardware=CPU)
    assert report.converted == ()
    assert same.weight.data_ptr() == weight


# ---- what is refused


def test_refusals_leave_the_model_as_it_was():
    for call, message in (
        (lambda model: cast_for_inference(model.train(), "bf16", hardware=CPU), r"Call model.eval\(\) first"),
        (lambda model: cast_for_inference(model, "bf16 module:hed=fp32", hardware=CPU), "module rule 'hed'"),
        (
            lambda model: cast_for_inference(model, "bf16", keep=["*", "hed*"], hardware=CPU),
            r"keep 'hed\*'.*such as 0.linear",
        ),
        (lambda model: cast_for_inference(model, "bf15", hardware=CPU), "bf15"),
        (
            lambda model: cast_for_inference(model.append(nn.LazyLinear(4)).eval(), "bf16", hardware=CPU),
            "6.weight of a laz",
        ),
    ):
        model = nn.Sequential(*[Seen() for _ in NAMES]).eval()
        with pytest.raises(HalfstepError, match=message):
            call(model)
        assert "forward" not in model.__dict__
        assert not any("forward" in module.__dict__ for module in model)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert model[0].linear.weight.dtype == FULL


def test_scripted_models_and_those_of_inference_mode_are_refused():
    with torch.inference_mode():
        model = build(Net)
    with pytest.raises(HalfstepError, match=r"stem\.linear\.weight, made in torch"):
        cast_for_inference(model, "bf16", hardware=CPU)
    scripted = nn.Linear(4, 4).eval()
    scripted.__class__ = type("Scripted", (nn.Linear, torch.jit.ScriptModule), {})  # torch.jit.script is deprecated
    with pytest.raises(HalfstepError, match="a scripted model"):
        cast_for_inference(scripted, "bf16", hardware=CPU)


def test_a_cast_model_does_not_train():
    model = build(Net)
    cast_for_inference(model, "bf16", hardware=CPU)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", hardware=CPU)
    with pytest.raises(HalfstepError, match="without a gradient"):
        stepper.step(lambda: model(torch.randn(2, 4)).float().sum())
