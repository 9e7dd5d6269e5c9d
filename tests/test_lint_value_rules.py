"""Where the rules on values draw their lines. What they are for is in their examples."""

import pytest

from halfstep.lint.check import check_source
from halfstep.lint.fix_edits import apply_edits
from halfstep.lint.rules import all_rules

CODES = {f"HS{n}" for n in (140, 141, 142, 143, 145, 146, 147, 148, 149, 156, 157, 158, 159)}
RULES = [rule for rule in all_rules() if rule.code in CODES]
HEAD = """\
import math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

layer = nn.Linear(8, 8).cuda()


def follow(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, index: torch.Tensor, model, flag, n: int):
    half, brain, wide = x.half(), x.bfloat16(), x.float()
    either = x.to(torch.float16 if flag else torch.bfloat16)
"""
REGIONS = {
    "none": "    with torch.no_grad():\n",
    "cuda": '    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):\n',
    "brain": '    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):\n',
    "cpu": '    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):\n',
    "any": '    with torch.no_grad(), torch.autocast("cuda" if flag else "cpu", dtype=torch.float16):\n',
    "off": '    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=False):\n',
}


def codes(line, region="none"):
    body = "".join(f"        {part.strip()}\n" for part in line.split(";"))
    return {finding.code for finding in check_source(HEAD + REGIONS[region] + body, "x.py", RULES)}


FOUND = [
    # a constant is refused beyond the largest number, and infinite half a step later
    ("half.masked_fill(mask, -65505.0)", "none", "HS140"),
    ("torch.where(mask, half, -65520.0)", "none", "HS140"),
    ("half.masked_fill(mask, torch.finfo(torch.float32).min)", "none", "HS140"),
    ("brain.masked_fill(mask, torch.finfo(torch.float32).min)", "none", "HS140"),
    ("x.masked_fill(mask, -1e9)", "cuda", "HS140"),
    ("half.masked_fill_(mask, -1e9)", "none", "HS140"),
    ("torch.full_like(half, 1e5)", "none", "HS140"),
    ("torch.full((2, 2), -1e9, dtype=torch.float16)", "none", "HS140"),
    ("half.clamp(max=1e6)", "none", "HS140"),
    ("half * -1e9", "none", "HS140"),
    ("half + 1e6", "none", "HS140"),
    ("half[mask] = -1e9", "none", "HS140"),
    ("either.masked_fill(mask, -1e9)", "none", "HS140"),
    ("low = torch.finfo(half.dtype).min; half.masked_fill(mask, low) + low", "none", "HS141"),
    ("low = -torch.finfo(half.dtype).max; half.masked_fill(mask, low) + mask.half() * low", "none", "HS141"),
    ("half + 2.98e-8", "none", "HS142"),
    ("1e-8 + half", "cuda", "HS142"),
    ("half.clamp_min(1e-12)", "none", "HS142"),
    ("layer(x) + 1e-8", "cuda", "HS142"),
    ("half.clamp(0, 0.9998)", "none", "HS143"),
    ("brain.clamp_max(0.9981)", "none", "HS143"),
    ("half * half", "cuda", "HS145"),
    ("half.square()", "cpu", "HS145"),
    ("half ** 2", "cpu", "HS145"),
    ("half ** 2", "off", "HS145"),
    ("torch.pow(half, 3)", "none", "HS145"),
    ("half.exp()", "none", "HS145"),
    ("half.sum()", "none", "HS146"),
    ("brain.cumsum(0)", "none", "HS146"),
    ("brain.log_softmax(-1).sum(-1)", "none", "HS146"),
    ("layer(x) @ layer(y).mT / 8", "cuda", "HS147"),
    ("half @ half.mT * 0.125", "none", "HS147"),
    ("F.binary_cross_entropy(y, y)", "brain", "HS148"),
    ("F.binary_cross_entropy(brain, y)", "cpu", "HS148"),
    ("F.cross_entropy(wide, index.long().float())", "none", "HS149"),
    ("F.cross_entropy(wide, target=y.half())", "none", "HS149"),
    ("half.sum() * 0.5", "none", "HS146"),
    ("half.sum() * 0", "none", "HS156"),
    ("half.sum() * 0.0", "any", "HS156"),
    ("F.normalize(half)", "none", "HS157"),
    ("F.normalize(half, eps=1e-9)", "cpu", "HS157"),
    ("F.cosine_similarity(half, half)", "off", "HS157"),
    ("out = torch.zeros(8, 8); out[mask.bool()] = half", "none", "HS158"),
    ("out = torch.zeros(8, 8); out[index] = half", "none", "HS158"),
    ("out = torch.zeros(8, 8); out[0, index.long()] = layer(x)", "cuda", "HS158"),
    ("out = torch.zeros(8, 8); out.scatter_(0, index, brain)", "none", "HS158"),
    ("out = torch.zeros(8, 8); out.index_add_(0, index, source=half)", "cuda", "HS158"),
    ("out = half.new_zeros(8); out[index.long()] = wide", "none", "HS158"),
    ("out = brain.new_zeros(8); out[index.long()] = half", "none", "HS158"),
    ("out = torch.zeros(8); out[index.long()] = either", "none", "HS158"),
    ("brain.cpu().numpy()", "none", "HS159"),
    ("np.stack([brain, brain])", "none", "HS159"),
    ("either.numpy()", "none", "HS159"),
]
SILENT = [
    ("half.masked_fill(mask, -65504.0)", "none"),
    ("torch.where(mask, half, -65519.0)", "none"),
    ("half.masked_fill(mask, -math.inf)", "none"),
    ("half.masked_fill(mask, -1e9 if flag else -1e4)", "none"),
    ("half.masked_fill(mask, torch.finfo(half.dtype).min)", "none"),
    ("x.masked_fill(mask, -1e9)", "none"),
    ("x.masked_fill(mask, -1e9)", "brain"),
    ("x.masked_fill(mask, -1e9)", "off"),
    ("x.softmax(-1).masked_fill(mask, -1e9)", "cuda"),
    ("half * 65536", "none"),
    ("wide + mask.bool() * -1e9", "none"),
    ("half < -1e9", "none"),
    ("half.amax().item() * -1e9", "none"),
    ("low = torch.finfo(wide.dtype).min; wide.masked_fill(mask, low) + low", "none"),
    ("low = torch.finfo(half.dtype).min; half + torch.zeros_like(half).masked_fill(mask, low)", "none"),
    ("low = torch.finfo(half.dtype).min / 2; half.masked_fill(mask, low) + mask.half() * low", "none"),
    ("half + 3e-8", "none"),
    ("brain + 1e-12", "none"),
    ("x + 1e-12", "cuda"),
    ("model(x) + 1e-12", "cuda"),
    ("half.softmax(-1) + 1e-8", "cuda"),
    ("half - 1e-8", "none"),
    ("half.amax().item() + 1e-8", "none"),
    ("half.clamp(0, 0.9997)", "none"),
    ("brain.clamp_max(0.998)", "none"),
    ("half.clamp(0, 1)", "none"),
    ("wide.clamp(0, 0.9999)", "none"),
    ("half ** 2", "cuda"),
    ("half ** 0.5", "none"),
    ("half * either", "none"),
    ("brain * brain", "none"),
    ("half.sigmoid() ** 2", "none"),
    ("p = half.sigmoid(); (1 - p) ** 2", "none"),
    ("half.tanh() * half.tanh()", "none"),
    ("torch.exp(half - half.amax())", "none"),
    ("torch.exp(-half)", "none"),
    ("half.log_softmax(-1).exp()", "none"),
    ("half.mean()", "none"),
    ("half.sum((1, 2))", "none"),
    ("half.sum()", "cuda"),
    ("half.sum(dtype=torch.float32)", "none"),
    ("half.requires_grad_().sum().backward()", "none"),
    ("model(x).sum()", "cpu"),
    ("half @ half.mT / 2", "none"),
    ("half @ half.mT / 0.05", "none"),
    ("half @ half.mT / math.sqrt(n)", "none"),
    ("half @ half.mT * 8", "none"),
    ("brain @ brain.mT / 8", "none"),
    ("half / 8 @ half.mT", "none"),
    ("F.binary_cross_entropy(y, y)", "none"),
    ("F.binary_cross_entropy(y, y)", "off"),
    ("F.binary_cross_entropy(wide, y)", "cpu"),
    ("F.binary_cross_entropy_with_logits(half, y)", "cuda"),
    ("F.cross_entropy(wide, index)", "none"),
    ("F.cross_entropy(wide, F.one_hot(index, 8).float())", "none"),
    ("F.cross_entropy(wide, mask.float())", "none"),
    ("y = F.one_hot(index, 8); F.cross_entropy(wide, y.float())", "none"),
    ("F.binary_cross_entropy_with_logits(wide, y.float())", "none"),
    ("half.sum() * 0", "cuda"),
    ("half.sum(dtype=torch.float32) * 0", "none"),
    ("brain.sum(dtype=torch.float32) * 0", "none"),
    ("F.normalize(half)", "cuda"),
    ("F.normalize(half, eps=1e-4)", "none"),
    ("F.normalize(brain)", "none"),
    ("F.normalize(model(x))", "cpu"),
    ("out = torch.zeros(8, 8); out[2:4] = half", "none"),
    ("out = half.new_zeros(8); out[index.long()] = either", "none"),
    ("out = half.new_zeros(8); out[index.long()] = x.to(torch.float16 if flag else torch.float32)", "none"),
    ("out = torch.zeros(8, dtype=torch.float64); out[index.long()] = wide", "none"),
    ("out = torch.zeros(8, 8); out[n] = half", "none"),
    ("out = torch.zeros(8, 8); out[index.long()] = half.amax().item()", "none"),
    ("out = torch.zeros(8, 8); out.scatter_(0, index, 1.0)", "none"),
    ("out = torch.zeros(8, 8); out.add_(half)", "none"),
    ("out = torch.zeros(8, 8); out[index.long()] = half.float()", "none"),
    ("half.numpy()", "none"),
    ("brain.tolist()", "none"),
    ("np.stack([brain.float()])", "none"),
    ("model(x).numpy()", "brain"),
]


@pytest.mark.parametrize(("line", "region", "code"), FOUND)
def test_found(line, region, code):
    assert codes(line, region) == {code}


@pytest.mark.parametrize(("line", "region"), SILENT)
def test_silent(line, region):
    assert codes(line, region) == set()


def test_one_16_bit_format_that_is_not_known_may_be_the_other():
    body = "        out = half.new_zeros(8); out[index] = layer(x)\n"
    region = '    with torch.no_grad(), torch.autocast("cuda", dtype=model.dtype):\n'
    assert check_source(HEAD + region + body, "x.py", RULES) == []
    body = "        out = torch.zeros(8); out[index] = layer(x)\n"
    assert [finding.code for finding in check_source(HEAD + region + body, "x.py", RULES)] == ["HS158"]


def test_indices_are_told_from_shares_by_their_name():
    def of(name):
        call = f"F.cross_entropy(z, {name}.float())"
        code = f"import torch.nn.functional as F\n# autocast\ndef loss(z, {name}):\n    return {call}\n"
        return [finding.code for finding in check_source(code, "x.py", RULES)]

    for name in ("y", "labels", "target", "class_ids", "true_labels"):
        assert of(name) == ["HS149"], name
    for name in ("soft_targets", "mixed_y", "one_hot", "weights", "p", "one_hot_labels", "smooth_labels"):
        assert of(name) == [], name


MENDED = [
    ("half.masked_fill(mask, -1e9)", "half.masked_fill(mask, torch.finfo(half.dtype).min)"),
    ("torch.full_like(half, 1e9)", "torch.full_like(half, torch.finfo(half.dtype).max)"),
    ("torch.where(mask, half, -1e9)", "torch.where(mask, half, torch.finfo(half.dtype).min)"),
    ("torch.where(mask, -1e9, half)", "torch.where(mask, torch.finfo(half.dtype).min, half)"),
    ("half[mask] = -1e9", "half[mask] = torch.finfo(half.dtype).min"),
    ("half.abs() + 1e-8", "half.abs().float() + 1e-8"),
    ("1e-8 + half", "1e-8 + half.float()"),
    ("half.clamp(min=1e-8)", "half.float().clamp(min=1e-8)"),
    ("torch.clamp(half, 0, 0.9999)", "torch.clamp(half.float(), 0, 0.9999)"),
    ("half * half", "half.float() * half.float()"),
    ("(half - either.half()) ** 2", "((half - either.half()).float()) ** 2"),
    ("half.cumsum(0)", "half.cumsum(0, dtype=torch.float32)"),
    ("half.sum()", "half.sum(dtype=torch.float32)"),
    ("half @ half.mT / 8", "(half / 8) @ half.mT"),
    ("0.125 * (half @ half.mT)", "(half * 0.125) @ half.mT"),
    ("F.cross_entropy(wide, y.float())", "F.cross_entropy(wide, y)"),
    ("half.sum() * 0", "half.float().sum() * 0"),
    ("F.normalize(half)", "F.normalize(half.float())"),
    ("out = torch.zeros(8); out[index] = half + 1", "out = torch.zeros(8); out[index] = (half + 1).to(out.dtype)"),
    ("brain.cpu().numpy()", "brain.cpu().float().numpy()"),
    ("np.asarray(brain)", "np.asarray(brain.float())"),
]
LEFT = [
    "half + 1e6",
    "out = half.new_zeros(8); out[index] = wide",
    "half[mask].masked_fill(mask, -1e9)",
    "half += 1e-8",
    "torch.matmul(half, half.mT) / 8",
]


def mended(line, region="none"):
    body = "".join(f"        {part.strip()}\n" for part in line.split(";"))
    (finding,) = check_source(HEAD + REGIONS[region] + body, "x.py", RULES)
    return apply_edits(HEAD + REGIONS[region] + body, finding.edits) if finding.edits else None


@pytest.mark.parametrize(("line", "better"), MENDED)
def test_a_fix_mends_the_line_alone(line, better):
    result = mended(line)
    start = HEAD + REGIONS["none"]
    assert result.startswith(start)
    assert "; ".join(part.strip() for part in result.removeprefix(start).splitlines()) == better
    assert codes(better) == set()


@pytest.mark.parametrize("line", LEFT)
def test_what_no_edit_mends_has_no_fix(line):
    assert mended(line) is None


def test_a_loss_of_probabilities_takes_logits():
    line = "nn.BCELoss()(torch.sigmoid(layer(x)), y)"
    assert mended(line, "cuda").splitlines()[-1].strip() == "nn.BCEWithLogitsLoss()(layer(x), y)"
    line = "F.binary_cross_entropy(layer(x).sigmoid(), y)"
    assert mended(line, "cuda").splitlines()[-1].strip() == "F.binary_cross_entropy_with_logits(layer(x), y)"
    assert mended("p = layer(x).sigmoid(); F.binary_cross_entropy(p, y)", "cuda") is None


def test_a_criterion_that_is_used_twice_keeps_its_form():
    line = "loss = nn.BCELoss(); loss(layer(x).sigmoid(), y)"
    assert "loss = nn.BCEWithLogitsLoss()" in mended(line, "cuda")
    body = "loss = nn.BCELoss()\n        loss(layer(x).sigmoid(), y)\n        loss(y, y)\n"
    found = check_source(f"{HEAD}{REGIONS['cuda']}        {body}", "x.py", RULES)
    assert [finding.fix for finding in found] == [None, None]
