"""The rules of the step on whole loops: sound ones of many shapes, mistakes that are easily missed, and their fixes."""

import re

import pytest

from halfstep.lint.check import check_source
from halfstep.lint.fix import fix_source
from halfstep.lint.rules import all_rules

RULES = [rule for rule in all_rules() if "HS101" <= rule.code <= "HS117"]
HEAD = "import accelerate, torch\nfrom torch import nn\n\n"
FORWARD = """\
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x).float(), y)
"""
"""Two lines of a loop in a function."""


def found(text):
    return [(finding.line, finding.code) for finding in check_source(text, "source.py", RULES)]


SOUND = {
    "two settings that are one": """\
def train(net, opt, loader, use_amp):
    scaler = torch.amp.GradScaler("cuda") if use_amp else None
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            loss = nn.functional.mse_loss(net(x).float(), y)
        if scaler:
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if use_amp:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
""",
    "scaler object with a call": """\
class Scaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, opt, parameters, clip=None, update=True):
        self._scaler.scale(loss).backward()
        if update:
            self._scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(parameters, clip) if clip else norm_of(parameters)
            self._scaler.step(opt)
            self._scaler.update()


def norm_of(parameters):
    return torch.stack([p.grad.detach().norm() for p in parameters if p.grad is not None]).norm()


def train(net, loader, opt, accumulate):
    scaler = Scaler()
    for i, (x, y) in enumerate(loader):
FORWARD        scaler(loss / accumulate, opt, net.parameters(), update=(i + 1) % accumulate == 0)
        if (i + 1) % accumulate == 0:
            opt.zero_grad()
""",
    "step and update in methods, hooks between": """\
class Engine:
    def __init__(self, net, hooks):
        self.net, self.hooks = net, hooks
        self.opt = torch.optim.Adam(net.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def fit(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(self.net(x).float(), y)
            self.scaler.scale(loss).backward()
            for hook in self.hooks:
                hook.after_backward(self)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.opt)
            for hook in self.hooks:
                hook.after_step(self)
""",
    "critic learns in an inner loop": """\
def train(gen, critic, opt_g, opt_c, scaler, loader):
    for real in loader:
        for _ in range(5):
            opt_c.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                gap = (critic(gen(real).detach()) - critic(real)).float().mean()
            scaler.scale(gap).backward()
            scaler.step(opt_c)
            scaler.update()
        opt_g.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            score = -critic(gen(real)).float().mean()
        scaler.scale(score).backward()
        scaler.step(opt_g)
        scaler.update()
""",
    "helper for each of several optimizers": """\
def serve(net, opt, scaler):
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)


def train(nets, opts, scaler, loader):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = sum(nn.functional.mse_loss(net(x).float(), y) for net in nets)
        scaler.scale(loss).backward()
        for net, opt in zip(nets, opts):
            serve(net, opt, scaler)
        scaler.update()
        for opt in opts:
            opt.zero_grad()
""",
    "scaler and optimizer known to helpers alone": """\
def backward(loss, scaler, opt):
    scaler.scale(loss).backward()
    scaler.unscale_(opt)


def apply(scaler, opt):
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


def train(net, opt, scaler, loader):
    for x, y in loader:
FORWARD        backward(loss, scaler, opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        apply(scaler, opt)
""",
    "helpers for optimizers that a list holds": """\
def unscale(opt, scaler):
    scaler.unscale_(opt)


def step(opt, scaler):
    scaler.step(opt)


def train(net, opts, a, b, scaler, loader):
    for x, y in loader:
FORWARD        scaler.scale(loss).backward()
        for o in opts:
            unscale(o, scaler)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for o in opts:
            step(o, scaler)
        step(a, scaler)
        step(b, scaler)
        scaler.update()
        net.zero_grad()
""",
    "conditions that say the same in other words": """\
def train(net, opt, scaler, loader, n):
    for i, (x, y) in enumerate(loader):
FORWARD        scaler.scale(loss / n).backward()
        boundary = (i + 1) % n == 0
        if boundary:
            scaler.unscale_(opt)
        if (i + 1) % n == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
        if due(i):
            scaler.update()
            opt.zero_grad()
""",
    "loop left for good after unscale_": """\
def train(net, opt, scaler, loader, budget):
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        if loss > budget:
            return False
        if budget == 0:
            break
        scaler.step(opt)
        scaler.update()
""",
    "norms of earlier steps read after a scaled backward": """\
def train(net, opt, scaler, loader):
    norms = []
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        print(torch.stack(norms).mean())
        scaler.unscale_(opt)
        norms.append(torch.stack([p.grad.norm() for p in net.parameters()]).norm())
        scaler.step(opt)
        scaler.update()
""",
    "sharpness-aware steps": """\
def train(net, opt, scaler, loader):
    for x, y in loader:
FORWARD        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        opt.first_step(zero_grad=True)
        scaler.update()
FORWARD        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        opt.second_step(zero_grad=True)
        scaler.update()
""",
    "plain and scaled passes, a step for each": """\
def train(a, b, opt_a, opt_b, scaler, loader):
    for x, y in loader:
        opt_a.zero_grad()
        opt_b.zero_grad()
        nn.functional.mse_loss(a(x), y).backward()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(b(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt_b)
        scaler.update()
        opt_a.step()
""",
    "last step needs no update": """\
def train(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        scaler.step(opt)
        if enough(net):
            break
        scaler.update()
""",
    "two rounds of one optimizer": """\
def learn(net, opt, scaler, x, y):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


def train(net, opt, scaler, loader):
    for x, y in loader:
        learn(net, opt, scaler, x, y)
        learn(net, opt, scaler, x.flip(-1), y)
""",
    "optimizer that Accelerate steps": """\
def train(net, opt, loader):
    accelerator, scaler = accelerate.Accelerator(), torch.amp.GradScaler("cuda")
    net, opt = accelerator.prepare(net, opt)
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        opt.step()
""",
    "penalty whose scale goes afterwards, or by a factor from elsewhere": """\
def penalty(net, scaler, x, inverse):
    with torch.autocast("cuda", dtype=torch.float16):
        score = net(x).float().sum()
    slope = torch.autograd.grad(scaler.scale(score), x, create_graph=True)[0]
    return slope.square().sum().sqrt() / scaler.get_scale()


def other(net, scaler, x, inverse):
    with torch.autocast("cuda", dtype=torch.float16):
        score = net(x).float().sum()
    slope = torch.autograd.grad(scaler.scale(score), x, create_graph=True)[0]
    return (slope * inverse).square().sum()
""",
    "fp16 with a scaler when there is one": """\
def train(net, opt, loader, scaler, use_scaler):
    for x, y in loader:
        opt.zero_grad()
FORWARD        if use_scaler:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        else:
            loss.backward()
            opt.step()
""",
    "region that may be off": """\
def train(net, opt, loader, amp):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = nn.functional.mse_loss(net(x).float(), y)
        loss.backward()
        opt.step()
""",
    "wrapped for several ranks after its optimizer": """\
class Job:
    def __init__(self, net: nn.Module):
        self.net = net
        self.opt = torch.optim.Adam(self.net.parameters())
        self.net = nn.parallel.DistributedDataParallel(self.net)

    def batch(self, x, y):
        self.opt.zero_grad()
        nn.functional.mse_loss(self.net(x), y).backward()
        self.opt.step()
""",
    "leaf of a stage": """\
def stage(h, gradient):
    h = h.detach().requires_grad_()
    h.backward(gradient)
    return h.grad
""",
    "wrapped or extended after its optimizer": """\
def train(net: nn.Module, loader):
    opt = torch.optim.Adam(net.parameters())
    net.inner = net
    net.extra = nn.Linear(8, 8)
    opt.add_param_group({"params": net.extra.parameters()})
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()
""",
    "scaled by hand": """\
def train(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
FORWARD        (loss * scaler.get_scale()).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
""",
    "static scale": """\
def train(net, opt, loader, scale):
    for x, y in loader:
        opt.zero_grad()
FORWARD        (loss * 1024).backward()
        for p in net.parameters():
            p.grad.div_(1024)
        opt.step()
""",
    "model replaced together with its optimizer": """\
class Job:
    def __init__(self, net):
        self.net, self.scaler = net, torch.amp.GradScaler("cuda")
        self.opt = torch.optim.Adam(self.net.parameters())
        self.reset(nn.Linear(8, 8))

    def reset(self, net):
        self.net = net
        self.opt = torch.optim.Adam(self.net.parameters())

    def batch(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
""",
    "passes that only measure, then a step elsewhere": """\
def profile(net, opt, scaler, loader):
    for x, y in loader:
FORWARD        scaler.scale(loss).backward()
    opt.zero_grad()
    opt.step()
""",
    "detached factor of a loss": """\
def train(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss * (1 / loss.detach()).clamp(max=2) + loss / 2).backward()
        scaler.step(opt)
        scaler.update()
""",
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_loop_is_silent(name):
    assert found(HEAD + SOUND[name].replace("FORWARD", FORWARD)) == []


MISTAKES = {
    "scaler and optimizer in a dict, clip in a context": """\
class Job:
    def __init__(self, net):
        self.net = net
        self.parts = {"scaler": torch.amp.GradScaler("cuda"), "opt": torch.optim.Adam(net.parameters())}

    def fit(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(self.net(x).float(), y)
            self.parts["scaler"].scale(loss).backward()
            with torch.no_grad():
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)  # HS101
            self.parts["scaler"].step(self.parts["opt"])
            self.parts["scaler"].update()
            self.parts["opt"].zero_grad()
""",
    "sharded model clips itself": """\
def train(net, opt, loader):
    scaler = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        net.clip_grad_norm_(1.0)  # HS101
        scaler.step(opt)
        scaler.update()
""",
    "one of two optimizers is unscaled": """\
def train(a, b, loader, scaler):
    opt_a, opt_b = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
    for x, y in loader:
        opt_a.zero_grad()
        opt_b.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(b(a(x)).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt_a)
        nn.utils.clip_grad_norm_(a.parameters(), 1.0)
        nn.utils.clip_grad_norm_(b.parameters(), 1.0)  # HS101
        scaler.step(opt_a)
        scaler.step(opt_b)
        scaler.update()
""",
    "weight decay added to scaled gradients": """\
def train(net, opt, loader, scaler):
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        for p in net.parameters():
            p.grad += 0.01 * p.data  # HS102
        scaler.step(opt)
        scaler.update()
""",
    "loss scaled in a helper": """\
def scaled_loss(net, scaler, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    return scaler.scale(nn.functional.l1_loss(out.float(), y))


def train(net, opt, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        loss = scaled_loss(net, scaler, x, y)
        loss.backward()
        opt.step()  # HS105
        opt.zero_grad()
""",
    "what scale gives is dropped": """\
def train(net, opt, loader, scaler):
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss)
        loss.backward()  # HS104
        scaler.step(opt)
        scaler.update()
""",
    "bad batch in a branch of its own": """\
def train(net, opt, loader, scaler):
    for x, y in loader:
FORWARD        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isnan(norm):  # HS106
            opt.zero_grad()
        else:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
""",
    "two optimizers and no update": """\
def train(a, b, loader, scaler):
    opt_a, opt_b = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
    for x, y in loader:
        opt_a.zero_grad()
        opt_b.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(b(a(x)).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt_a)
        scaler.step(opt_b)  # HS106
""",
    "two rounds and one update": """\
def train(net, opt, loader, scaler):
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        scaler.step(opt)  # HS106
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
    "update in two helpers": """\
def learn(net, opt, scaler, x, y):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


def train(a, b, opt_a, opt_b, loader, scaler):
    for x, y in loader:
        learn(a, opt_a, scaler, x, y)  # HS107
        learn(b, opt_b, scaler, x, y)
""",
    "part of a part is replaced": """\
def finetune(net, loader, scaler):
    opt = torch.optim.Adam(net.parameters())
    net.classifier[6] = nn.Linear(4096, 10)  # HS110
    for x, y in loader:
        opt.zero_grad()
FORWARD        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
    "generator is trained without a scaler": """\
def train(net, opt, loader):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):  # HS115
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        loss.backward()
        opt.step()
        yield loss.detach()
""",
    "decorated training loop": """\
@torch.autocast("cuda", dtype=torch.bfloat16)  # HS116
def train(net, opt, loader):
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(net(x).float(), y).backward()
        opt.step()
""",
    "weights of an average assigned": """\
def evaluate(net, average, x):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        first = net(x)
        for p, q in zip(net.parameters(), average.parameters()):
            p.data = q.data  # HS117
        return first, net(x)
""",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found_at_its_line(name):
    text = HEAD + MISTAKES[name].replace("FORWARD", FORWARD)
    marked = [(n, m[1]) for n, line in enumerate(text.splitlines(), 1) if (m := re.search(r"# (HS\d+)$", line))]
    assert found(re.sub(r"  # HS\d+$", "", text, flags=re.M)) == marked


FIXED = [
    ("HS101", 0, "        nn.utils.clip", "        scaler.unscale_(opt)\n        nn.utils.clip"),
    ("HS104", 0, "        loss.backward()", "        scaler.scale(loss).backward()"),
    ("HS105", 0, "        opt.step()", "        scaler.step(opt)\n        scaler.update()"),
    ("HS105", 1, "self.slow.step()", "self.gs.step(self.slow)"),
    ("HS106", 0, "        scaler.step(opt)", "        scaler.step(opt)\n        scaler.update()"),
    ("HS106", 1, "            return False", "            self.gs.update()\n            return False"),
    ("HS106", 2, "        gs.step(opt)\n        gs.update()", "        gs.step(opt)\n    gs.update()"),
]


@pytest.mark.parametrize(("code", "number", "old", "new"), FIXED)
def test_fix(code, number, old, new):
    rule = next(rule for rule in RULES if rule.code == code)
    text = re.sub(r"  # HS\d+$", "", rule.bad[number], flags=re.M)
    assert text.count(old) == 1
    fixed = fix_source(text, "source.py", lambda t, f: check_source(t, f, RULES))
    assert fixed.text == text.replace(old, new)
    assert fixed.refused == []


def test_fix_moves_a_late_unscale_and_keeps_the_arguments_of_backward():
    rule = next(rule for rule in RULES if rule.code == "HS101")
    fixed = fix_source(
        re.sub(r"  # HS\d+$", "", rule.bad[1], flags=re.M), "a.py", lambda t, f: check_source(t, f, RULES)
    )
    assert "        self.amp.unscale_(self.optim)\n        self.limit()\n        self.amp.step" in fixed.text
    text = (
        HEAD
        + "def f(net, opt, scaler, x, y):\n"
        + FORWARD.replace("        ", "    ", 1).replace("            ", "        ")
    )
    text += "    (2 * loss).backward(retain_graph=True)\n    scaler.step(opt)\n    scaler.update()\n"
    fixed = fix_source(text, "a.py", lambda t, f: check_source(t, f, RULES))
    assert "    scaler.scale(2 * loss).backward(retain_graph=True)\n" in fixed.text


def test_no_fix_where_it_would_guess():
    text = (
        HEAD
        + """\
def limit(net):
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def forward_and_backward(net, scaler, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    scaler.scale(loss).backward()
    limit(net)


def train(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
        forward_and_backward(net, scaler, x, y)
        scaler.step(opt)
        scaler.update()
"""
    )
    (finding,) = check_source(text, "a.py", RULES)
    assert (finding.line, finding.code, finding.fix) == (12, "HS101", None)  # the optimizer is not at hand there


def test_no_fix_for_one_of_two_optimizers_or_for_a_step_in_another_block():
    (finding,) = check_source(HEAD + MISTAKES["one of two optimizers is unscaled"], "a.py", RULES)
    assert (finding.code, finding.fix) == ("HS101", None)
    text = (
        HEAD
        + """\
def train(net, opt, scaler, loader):
    for i, (x, y) in enumerate(loader):
FORWARD        scaler.scale(loss / 4).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with torch.profiler.record_function("step"):
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
"""
    )
    (finding,) = check_source(text.replace("FORWARD", FORWARD), "a.py", RULES)
    assert (finding.line, finding.code, finding.fix) == (9, "HS101", None)


def test_both_of_two_clips_are_found_and_one_unscale_mends_them():
    rule = next(rule for rule in RULES if rule.code == "HS101")
    text = re.sub(r"  # HS\d+$", "", rule.bad[0], flags=re.M)
    clip = "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    twice = text.replace(clip, 2 * clip)
    assert [code for _, code in found(twice)] == ["HS101", "HS101"]
    fixed = fix_source(twice, "a.py", lambda t, f: check_source(t, f, RULES))
    assert fixed.text.count("unscale_") == 1
    assert found(fixed.text) == []
