"""Loops rewritten to a Stepper: what they become, that they train as before, and what is left alone and why."""

import textwrap

import pytest
import torch

from halfstep.lint.to_halfstep import to_halfstep

SETUP = """\
import torch
import torch.nn.functional as F
from torch import nn
{imports}
torch.manual_seed(0)
data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(8)]
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
"""


def script(body, imports=""):
    return SETUP.format(imports=imports) + textwrap.dedent(body)


def converted(body, imports=""):
    text = script(body, imports)
    conversion = to_halfstep(text, "a.py")
    assert (conversion.num_converted, conversion.refused) == (1, ())
    again = to_halfstep(conversion.text, "a.py")
    assert (again.text, again.num_converted, again.refused) == (conversion.text, 0, ())
    return conversion.text


def run(text):
    """The weights and losses of a script."""
    names = {"__name__": "script"}
    exec(compile(text, "script", "exec"), names)
    return [p.detach().clone() for p in names["model"].parameters()], names.get("losses", [])


def body_of(text):
    return text[text.index("model = ") :].partition("\n")[2]


PLAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for epoch in range(3):
    for x, y in data:
        # the forward pass
        logits = model(x)
        loss = F.cross_entropy(logits, y)  # a mean

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def test_plain():
    text = converted(PLAIN)
    assert (
        body_of(text)
        == """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
stepper = halfstep.Stepper(model, optimizer, "fp32")
losses = []
for epoch in range(3):
    for x, y in data:
        # the forward pass
        with stepper.forward():
            logits = model(x)
            loss = F.cross_entropy(logits, y)  # a mean

        stepper.backward(loss)
        losses.append(loss.item())
"""
    )
    assert same_bits(run(text), run(script(PLAIN)))


def same_bits(first, second):
    return all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)) and first[1] == second[1]


AMP = """
device = "cpu"
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
scaler = torch.amp.GradScaler(device, init_scale=2.0**10)  # needed
losses = []
for epoch in range(3):
    for x, y in data:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
"""


def test_amp_with_all_its_parts():
    text = converted(AMP)
    assert (
        body_of(text)
        == """
device = "cpu"
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
stepper = halfstep.Stepper(model, optimizer, "fp16 scale.init=1024", max_norm=0.5, scheduler=scheduler)  # needed
losses = []
for epoch in range(3):
    for x, y in data:
        with stepper.forward():
            logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
        stepper.backward(loss)
        losses.append(loss.item())
"""
    )
    assert_close(run(text), run(on_cuda_lists(script(AMP))))


def on_cuda_lists(text):
    """A CPU loop whose region has CUDA's lists of operations, as a Stepper's has."""
    return text.replace("torch.autocast(", "halfstep.autocast(").replace(
        "import torch\n", "import torch, halfstep\n", 1
    )


def assert_close(first, second):
    """Gradients differ by the rounding of one division; over 24 steps that stays below 1e-5."""
    for a, b in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert first[1] == pytest.approx(second[1], rel=1e-4)


WINDOWS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
losses = []
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        {backward}
        if {test}:
            optimizer.step()
            optimizer.zero_grad()
        losses.append({logged})
"""
ENDS = [
    ("(loss / 4).backward()", "(i + 1) % 4 == 0", "loss.item()"),
    ("(loss / 4).backward()", "i % 4 == 4 - 1", "loss.item()"),
    ("(loss / 4).backward()", "not (i + 1) % 4", "loss.item()"),
    ("(loss / 4).backward()", "(i + 1) % 4 == 0 or i + 1 == len(data)", "loss.item()"),
    ("loss = loss / 4\n        loss.backward()", "(i + 1) % 4 == 0", "0.0"),
    ("loss /= 4\n        loss.backward()", "(i + 1) % 4 == 0", "0.0"),
]


@pytest.mark.parametrize(("backward", "test", "logged"), ENDS)
def test_windows(backward, test, logged):
    before = WINDOWS.format(backward=backward, test=test, logged=logged)
    text = converted(before)
    flush = "    stepper.flush()\n" if "len(data)" in test else ""
    assert (
        body_of(text)
        == f"""
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stepper = halfstep.Stepper(model, optimizer, "fp32", accumulate=4)
losses = []
for epoch in range(3):
    for i, (x, y) in enumerate(data):
        with stepper.forward():
            loss = F.cross_entropy(model(x), y)
        stepper.backward(loss)
        losses.append({logged})
{flush}"""
    )
    assert_close(run(text), run(script(before)))


def test_what_else_ends_a_window_stays_there():
    text = converted("""
        N = 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        losses = []
        for i, (x, y) in enumerate(data, 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y) / N
                loss = loss / N
            loss.backward()
            if i % N == 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                schedule.step()
                model.zero_grad()
                # one window
                losses.append(schedule.get_last_lr()[0])
    """)
    assert (
        body_of(text)
        == """
N = 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
stepper = halfstep.Stepper(model, optimizer, "bf16", accumulate=N, max_norm=1.0, scheduler=schedule)
losses = []
for i, (x, y) in enumerate(data, 1):
    with stepper.forward():
        loss = F.cross_entropy(model(x).float(), y) / N
    report = stepper.backward(loss)
    if report is not None:
        # one window
        losses.append(schedule.get_last_lr()[0])
"""
    )
    assert run(text)[1] == pytest.approx([0.1, 0.01, 0.01, 0.001])


FUNCTION = """
def train(model, batches, use_amp, max_norm, checkpoint=None):
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    grad_scaler = GS("cpu", enabled=use_amp)
    if checkpoint is not None:
        grad_scaler.load_state_dict(checkpoint["scaler"])
    step = 0
    while step < 8:
        x, y = batches[step]
        step += 1
        if x is None:
            continue
        with autocast("cpu", torch.float16, enabled=use_amp):
            loss = F.cross_entropy(model(x).float(), y)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        grad_scaler.step(optimizer); grad_scaler.update()
        optimizer.zero_grad()
        if step == 6: break
    return {"model": model.state_dict(), "scaler": grad_scaler.state_dict()}


with autocast("cpu", torch.float16):
    model(data[0][0])
saved = train(model, data, True, 0.5)
saved = train(model, data, True, 0.5, saved)
"""
FUNCTION_IMPORTS = """\
from torch.amp import GradScaler as GS, autocast
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
"""


def test_a_function_with_aliases_flags_and_saved_state():
    text = converted(FUNCTION, FUNCTION_IMPORTS)
    assert "from torch.amp import autocast\nfrom torch.optim import AdamW\n" in text
    assert (
        text[text.index("    optimizer = ") : text.index("\n\n\nwith")]
        == """\
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    stepper = halfstep.Stepper(model, optimizer, "fp16" if use_amp else "fp32", max_norm=max_norm)
    if checkpoint is not None:
        stepper.load_state_dict(checkpoint["scaler"])
    step = 0
    while step < 8:
        x, y = batches[step]
        step += 1
        if x is None:
            continue
        with stepper.forward():
            loss = F.cross_entropy(model(x).float(), y)
        stepper.backward(loss)
        if step == 6: break
    return {"model": model.state_dict(), "scaler": stepper.state_dict()}"""
    )
    before = script(FUNCTION, FUNCTION_IMPORTS).replace("with autocast(", "with halfstep.autocast(")
    assert_close(run(text), run(before.replace("import torch\n", "import torch, halfstep\n", 1)))


def test_an_import_whose_comments_would_go_stays():
    imports = "from torch.nn.utils import (\n    clip_grad_norm_,  # why\n    parametrizations,\n)\n"
    before = PLAIN.replace("optimizer.step()", "clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()")
    assert imports in converted(before, imports)


def test_tabs_and_carriage_returns_stay():
    before = script(PLAIN).replace("    ", "\t").replace("\n", "\r\n")
    text = to_halfstep(before, "a.py").text
    assert "\r\n\t\twith stepper.forward():\r\n\t\t\tlogits = model(x)\r\n" in text
    assert text.count("\r\n") == text.count("\n")
    assert same_bits(run(text), run(before))


def test_two_functions_are_two_loops():
    function = "def train{}(model):\n" + textwrap.indent(PLAIN.strip(), "    ") + "\n    return losses\n\n\n"
    before = script("\n" + function.format(1) + function.format(2) + "losses = train1(model) + train2(model)\n")
    conversion = to_halfstep(before, "a.py")
    assert (conversion.num_converted, conversion.refused) == (2, ())
    assert same_bits(run(conversion.text), run(before))


@pytest.mark.parametrize(
    "parameters",
    ["filter(lambda p: p.requires_grad, model.parameters())", "[q for q in model.parameters() if q.requires_grad]"],
)
def test_frozen_parameters(parameters):
    freeze = "\nmodel[0].weight.requires_grad = False\noptimizer"
    before = PLAIN.replace("model.parameters()", parameters).replace("\noptimizer", freeze, 1)
    assert same_bits(run(converted(before)), run(script(before)))


# What is left alone.

BASE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
LEFT_ALONE = [
    (BASE, "loss.backward()", "loss.backward(retain_graph=True)", 13, "backward is called with arguments"),
    (BASE, "loss.backward()", "F.mse_loss(model(x), x).backward()", 13, "the loss has no name"),
    (BASE, "loss.backward()", "loss.backward()\n    loss.backward()", 14, "a second backward pass"),
    (BASE, "loss.backward()", "model[0].weight.grad.mul_(2)\n    loss.backward()", 13, "gradients are read or changed"),
    (BASE, "loss.backward()", "loss.backward()\n    log(model)", 14, "may change the gradients between"),
    (BASE, "loss.backward()", "loss.backward()\n    optimizer.zero_grad()", 14, "may change the gradients between"),
    (BASE, "loss.backward()", "if y.sum() > 9: continue\n    loss.backward()", 13, "leaves the iteration before"),
    (BASE, "loss.backward()", "(loss / 2).backward()", 13, "the loss is divided by 2, and there is no window"),
    (BASE, "loss.backward()", "accelerator.backward(loss)", 13, "backward is called with arguments"),
    (BASE, "optimizer.zero_grad()", "pass", 10, "gradients are never cleared"),
    (BASE, "zero_grad()", "zero_grad(set_to_none=False)", 11, "zero_grad with an argument"),
    (BASE, "optimizer.step()", "optimizer.step(lambda: loss)", 14, "optimizer is used where it is not understood"),
    (
        BASE,
        "optimizer.step()",
        "if x is not None:\n        optimizer.step()",
        14,
        "under a condition that is no window's end",
    ),
    (
        BASE,
        "optimizer.step()",
        "optimizer.step()\n    log(optimizer)",
        15,
        "optimizer is used where it is not understood",
    ),
    (BASE, "optimizer.step()", "if i % 2 == 0:\n        optimizer.step()", 14, "under a condition"),
    (BASE, "    optimizer.step()\n", "", 10, "no optimizer step in the loop"),
    (
        BASE,
        "optimizer.step()",
        "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()",
        14,
        "the result of clip is kept",
    ),
    (
        BASE,
        "optimizer.step()",
        "nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)\n    optimizer.step()",
        14,
        "it does not clip",
    ),
    (
        BASE,
        "optimizer.step()",
        "nn.utils.clip_grad_norm_(model.parameters(), x.max())\n    optimizer.step()",
        14,
        "is computed in the loop",
    ),
    (BASE, "optimizer.step()", "optimizer.step()\n    second.step()", 15, "second is not made in the function"),
    (BASE, "SGD(", "LBFGS(", 9, "takes one gradient a step"),
    (BASE, "optimizer = t", "model = model.to('cpu', torch.bfloat16)\noptimizer = t", 9, "model is not in fp32"),
    (BASE, "optimizer = t", "model = model.half()\noptimizer = t", 9, "model is not in fp32"),
    (BASE, "for x, y in data:", "with torch.autocast('cpu'):\n  for x, y in data:", 10, "the whole loop runs in it"),
    (BASE, "for x", "torch.set_autocast_enabled('cpu', True)\nfor x", 10, "autocast is switched by hand"),
    (
        BASE,
        "for x, y in data:",
        "for _ in data:\n  optimizer = optimizer_of(2)\n  for x, y in data:",
        11,
        "bound more than once",
    ),
    (
        PLAIN,
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\nlosses = []\nfor epoch in range(3):\n",
        "losses = []\nfor epoch in range(3):\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        11,
        "optimizer is not made once before the loop",
    ),
    (
        BASE,
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        "if model:\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        10,
        "optimizer is not made once before the loop",
    ),
    (
        BASE + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        "",
        14,
        "optimizer is not made once before the loop",
    ),
    (
        BASE,
        "optimizer.step()",
        "model = nn.Linear(16, 4)\n    optimizer.step()",
        14,
        "model is bound anew after the optimizer was made",
    ),
    (
        BASE,
        "optimizer.step()",
        "with torch.autocast('cpu'): pass\n    with torch.autocast('cpu'): pass\n    optimizer.step()",
        15,
        "a second region",
    ),
    (BASE, "model.parameters(), lr", "model[0].parameters(), lr", 9, "does not hold all parameters of one model"),
    (BASE, "for x", "model = torch.compile(model)\nfor x", 10, "something is compiled"),
    (BASE, "for x", "model = nn.Linear(16, 4)\nfor x", 10, "model is bound anew after the optimizer was made"),
    (BASE, "for x", "model.to(place)\nfor x", 10, "model is moved after"),
    (BASE, "for x", "model.half()\nfor x", 10, "model is not in fp32"),
    (BASE, "for x", "stepper = 1\nprint(stepper)\nfor x", 11, "stepper is used elsewhere"),
    (BASE, "for x", "torch.backends.cuda.matmul.allow_tf32 = True\nfor x", 10, "TF32 is switched by hand"),
    (BASE, "for x", "import deepspeed\nfor x", 11, "deepspeed has a part in the step"),
    (BASE, "lr=0.1)", "lr=0.1)\noptimizer.step()", 10, "optimizer is used elsewhere"),
    (BASE, "    loss = F", "    loss = 0 * F.mse_loss(x, x); loss = F", 12, "it shares a line"),
    (BASE, "y)", 'y, reduction="""\nmean""".strip())', 12, "a string over several lines"),
    (BASE, "optimizer.step()\n", "optimizer.step()\nelse:\n    print(x)\n", 16, "the loop has an else"),
    (AMP, "        scaler.unscale_(optimizer)\n", "", 16, "clipped while they carry the scale"),
    (AMP, "        scaler.update()\n", "", 16, "no update in its own lines"),
    (AMP, "dtype=torch.float16", "dtype=torch.bfloat16", 13, "a GradScaler with a bf16 region"),
    (AMP, "dtype=torch.float16", "dtype=kind", 18, "the dtype of the region is not known"),
    (AMP, "dtype=torch.float16", "dtype=torch.float16, enabled=on", 18, "not switched by the same name"),
    (AMP, "dtype=torch.float16", "dtype=torch.float16, cache_enabled=False", 18, "cache_enabled"),
    (AMP, "torch.autocast(device", 'torch.autocast("cuda"', 18, "not known to be that of model"),
    (AMP, "model = model.to(device)", "model = model.to(other)", 18, "not known to be that of model"),
    (AMP, "init_scale=2.0**10", "init_scale=1000", 13, "init_scale is not a power of two"),
    (
        AMP,
        "losses.append(loss.item())",
        "losses.append(scaler.get_scale())",
        27,
        "scaler is used where it is not understood",
    ),
    (
        AMP,
        "        scheduler.step()\n",
        "        if epoch: scheduler.step()\n",
        26,
        "under a condition that is no window's end",
    ),
    (AMP, "losses = []\n", "losses = []\nprint(scaler.get_scale())\n", 15, "scaler is used elsewhere"),
    (
        AMP,
        "        scaler.step",
        "        scaler.update()\n        scaler.step",
        16,
        "the order backward, unscale_, clip, update, step",
    ),
    (BASE, "loss = F", "with torch.autocast('cpu', torch.float16): loss = F", 12, "fp16 region without a GradScaler"),
    (FUNCTION, "    step = 0\n", "    step = 0\n    use_amp = False\n", 20, "use_amp may change while the loop runs"),
    (AMP, "LinearLR(optimizer", "LinearLR(other", 12, "the scheduler is not one of optimizer"),
    (AMP, "with torch.autocast(", "with torch.no_grad(), torch.autocast(", 18, "entered together with something else"),
    (AMP, "init_scale=2.0**10", "init_scale=2.0**30", 13, "init_scale is not a power of two that is known here"),
    (
        AMP,
        "            logits = model(x)\n            loss = F.cross_entropy(logits.float(), y)\n",
        "            pass\n        loss = F.cross_entropy(model(x).float(), y)\n",
        18,
        "the region does not hold the forward pass",
    ),
    (AMP, "scaler = torch", "if saved: scaler.load_state_dict(saved)\nscaler = torch", 13, "scaler is used elsewhere"),
    (AMP, "losses = []\n", "losses = []\ndef save(): return scaler.state_dict()\n", 15, "scaler is used elsewhere"),
    (AMP, "scaler.scale(loss).backward()", "scaler.scale(loss / 2 / 2).backward()", 21, "the loss has no name"),
    (
        AMP,
        "scaler.scale(loss).backward()",
        "loss /= 2; scaler.scale(loss / 2).backward()",
        21,
        "the loss is divided twice",
    ),
    (AMP, "parameters(), 0.5", "parameters(), limit); limit = max(1, 2", 23, "limit may change while the loop runs"),
    (AMP, "scaler.scale(loss).backward()", "loss.backward()", 21, "the loss is not scaled"),
    (AMP, "for epoch in range(3):", "for scaler in range(3):", 15, "scaler is bound more than once"),
    (WINDOWS, "{backward}", "loss.backward()", 15, "the loss is not divided, and a window has 4 micro-batches"),
    (WINDOWS, "{backward}", "loss = loss / 4\n        loss.backward()", 20, "loss is read after it was divided"),
    (WINDOWS, "{backward}", "(loss / 2).backward()", 15, "divided by 2, and a window has 4"),
    (WINDOWS, "        loss =", "        optimizer.zero_grad()\n        loss =", 14, "and not at the window's end"),
    (
        WINDOWS,
        "            optimizer.step()",
        "            print(i)\n            report = 1\n            optimizer.step()",
        16,
        "the name report is taken",
    ),
    (
        WINDOWS,
        "            optimizer.step()",
        "            loss.sum().backward()\n            optimizer.step()",
        17,
        "a second backward pass",
    ),
    (
        WINDOWS,
        "data):\n        loss = F.cross_entropy(model(x), y)\n        {backward}\n        if {test}",
        "data, 1):\n        loss = F.cross_entropy(model(x), y)\n        {backward}\n        if i % 4 == 4 - 1",
        16,
        "under a condition that is no window's end",
    ),
    (WINDOWS, "{test}", "i % 4 == 2", 16, "under a condition that is no window's end"),
    (WINDOWS, "enumerate(data)", "enumerate(data, 5)", 16, "under a condition that is no window's end"),
    (WINDOWS, "        loss =", "        if i == 9: break\n        loss =", 14, "leaves the iteration"),
]


@pytest.mark.parametrize(("text", "old", "new", "line", "why"), LEFT_ALONE)
def test_left_alone(text, old, new, line, why):
    assert old in text
    before = script(text.replace(old, new, 1), FUNCTION_IMPORTS if text is FUNCTION else "")
    before = before.replace("{backward}", "(loss / 4).backward()").replace("{test}", "(i + 1) % 4 == 0")
    before = before.replace("{logged}", "loss.item()")
    conversion = to_halfstep(before, "a.py")
    assert (conversion.text, conversion.num_converted) == (before, 0)
    ((at, said),) = conversion.refused
    assert at == line
    assert said.startswith("the training loop stays as it is: ")
    assert why in said


def test_a_step_in_a_function_of_its_own_is_named():
    text = script("def step(x):\n    loss = model(x).sum()\n    loss.backward()\n")
    assert to_halfstep(text, "a.py").refused == (
        (10, "the training loop stays as it is: the backward pass is not in a loop of its own function"),
    )


def test_nothing_to_do():
    assert to_halfstep("x = (\n", "a.py") == to_halfstep("x = (\n", "b.py")
    assert to_halfstep("x = 1\n", "a.py").refused == ()
