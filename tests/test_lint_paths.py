"""What following a source gives: events in order, branches, loops, calls, and what values are worth."""

import textwrap

import pytest

from halfstep.lint.event import comparable
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object, Parameters, Scale, Table, Tensor

HEAD = """\
import torch
from torch import nn
scaler = torch.amp.GradScaler("cuda")
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
STEP = {"scale", "backward", "unscale_", "clip_grad_norm_", "step", "update", "zero_grad"}


def script(text, head=HEAD):
    return Script(head + textwrap.dedent(text), "x.py")


def order(path):
    """The names of the events of a step along a path."""
    names = [event.name.rpartition(".")[2] for event in path if event.what != "read"]
    return [name for name in names if name in STEP]


def orders(text, head=HEAD):
    return [order(path) for path in script(text, head).paths]


def site(found, what):
    return next(event for event in found.sites if event.what == what)


def worth(text):
    """The value of the last expression, handed to a function that nobody knows."""
    found = script(text)
    return next(event.args[0] for event in reversed(found.sites) if event.what == "other" and event.name == "show")


# -- order --


def test_a_step_in_a_loop_runs_twice():
    (path,) = script("""
        for x, y in batches:
            scaler.scale(net(x)).backward()
            scaler.step(opt)
            scaler.update()
    """).paths
    assert order(path) == ["scale", "backward", "step", "update"] * 2
    assert [event.what for event in path if event.what in {"loop", "again", "end"}] == ["loop", "again", "end"]
    assert [event.loops[-1].turn for event in path if event.what == "scaler.update"] == [0, 1]


def test_a_condition_that_matters_gives_two_paths():
    assert orders("""
        loss.backward()
        if ready():
            opt.step()
    """) == [["backward", "step"], ["backward"]]


def test_a_condition_that_does_not_matter_gives_one():
    assert orders("""
        loss.backward()
        if verbose:
            print(loss)
        opt.step()
    """) == [["backward", "step"]]


def test_one_setting_has_one_answer():
    found = orders("""
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if not use_amp:
            opt.step()
        else:
            scaler.step(opt)
    """)
    assert found == [["scale", "backward", "step"], ["backward", "step"]]
    (first, second) = script("""
        if use_amp:
            scaler.step(opt)
        else:
            opt.step()
    """).paths
    assert [event.what for event in first if event.name == "step" and event.what != "read"] == ["scaler.step"]
    assert [event.what for event in second if event.name == "step" and event.what != "read"] == ["optimizer.step"]


def test_a_decision_is_forgotten_when_what_it_reads_changes():
    assert (
        len(
            orders("""
        if flag:
            opt.step()
        flag = other()
        if flag:
            opt.step()
    """)
        )
        == 4
    )


def test_settings_and_steps_are_told_apart():
    for condition, is_mode in [("use_amp", True), ("cfg.fp16", True), ("args.precision == 'fp16'", True),
                               ("i % 4 == 0", False), ("torch.isfinite(norm)", False)]:  # fmt: skip
        first = script(f"if {condition}:\n    opt.step()").paths[0]
        assert first.decisions[0].is_mode == is_mode, condition


def test_what_cannot_be_is_not_followed():
    assert orders("""
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
        if False:
            opt.step()
    """) == [["step"]]


def test_a_branch_that_raises_is_no_step():
    assert orders("""
        loss.backward()
        if not good(loss):
            raise ValueError("loss")
        opt.step()
    """) == [["backward", "step"]]


def test_continue_leaves_the_turn():
    found = orders("""
        for x in batches:
            loss.backward()
            if bad(x):
                continue
            opt.step()
    """)
    assert ["backward", "step", "backward", "step"] in found
    assert ["backward", "backward", "step"] in found
    assert ["backward", "backward"] in found


def test_break_and_return_leave_the_loop():
    text = """
        def train():
            for x in batches:
                loss.backward()
                if bad(x):
                    {}
                opt.step()
            opt.zero_grad()
        train()
    """
    assert ["backward", "zero_grad"] in orders(text.format("break"))
    assert ["backward"] in orders(text.format("return"))


def test_helpers_are_entered_with_what_they_are_given():
    (path,) = script("""
        class Trainer:
            def __init__(self, model, gs):
                self.model, self.gs = model, gs
                self.optimizer = make(model)

            def apply(self, loss, optimizer):
                self.gs.scale(loss).backward()
                clip(self.model)
                self.gs.step(optimizer)

        def make(model):
            return torch.optim.Adam(model.parameters())

        def clip(model):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        trainer = Trainer(net, scaler)
        trainer.apply(loss, trainer.optimizer)
    """).paths
    assert order(path) == ["scale", "backward", "clip_grad_norm_", "step"]
    clip = next(event for event in path if event.what == "clip")
    step = next(event for event in path if event.what == "scaler.step")
    assert isinstance(step.args[0], Object)
    assert step.args[0].type == "torch.optim.Adam"
    assert isinstance(clip.args[0], Parameters)
    assert clip.args[0] == step.args[0].argument("params", 0)
    assert [type(call).__name__ for call in clip.calls] == ["Call", "Call"]


def test_a_function_that_nothing_calls_is_a_root():
    found = script(
        """
        def train(loss, scaler, opt):
            scaler.scale(loss).backward()
            scaler.step(opt)
    """,
        head="",
    )
    assert [order(path) for path in found.paths if getattr(path.root, "name", "") == "train"] == [
        ["scale", "backward", "step"]
    ]


def test_a_method_runs_after_its_constructor():
    found = script("""
        class Job:
            def __init__(self):
                self.gs = torch.amp.GradScaler("cuda", enabled=False)
            def step(self, loss):
                self.gs.scale(loss).backward()
    """)
    path = next(path for path in found.paths if getattr(path.root, "name", "") == "step")
    scale = next(event for event in path if event.what == "scaler.scale")
    assert scale.receiver.argument("enabled") == Const(False)


def test_regions_are_around_their_events():
    found = script("""
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                a = net(x)
            b = net(x)
        c = net(x)
    """)
    inner, outer, none = [event for event in found.paths[0] if event.what == "forward"]
    assert inner.region.argument("enabled") == Const(False)
    assert inner.in_no_grad
    assert outer.region.argument("enabled") is None
    assert outer.result.formats == {"bf16"}
    assert none.region is None
    assert not none.in_no_grad


def test_a_context_manager_of_the_source_and_a_decorator_open_a_region():
    found = script("""
        from contextlib import contextmanager

        @contextmanager
        def mixed():
            with torch.autocast("cuda", dtype=torch.float16):
                yield

        @torch.autocast("cuda", dtype=torch.bfloat16)
        def run(x):
            return net(x)

        with mixed():
            net(x)
        run(x)
        net(x)
    """)
    regions = [event.region for event in found.paths[0] if event.what == "forward"]
    assert regions[0].argument("dtype").qualified == "torch.float16"
    assert regions[1].argument("dtype").qualified == "torch.bfloat16"
    assert regions[2] is None


def test_too_many_ways_are_cut_and_said():
    lines = "\n".join(f"if f{n}(x) > {n}:\n    opt.step()" for n in range(12))
    found = script(lines)
    assert not found.is_complete
    assert len(found.paths) == 40
    assert script("opt.step()").is_complete


def test_recursion_and_cycles_end():
    found = script("""
        def a(x):
            scaler.update()
            return b(x)
        def b(x):
            return a(x)
        class Loop(nn.Module):
            def __init__(self):
                super().__init__()
                self.me = self
            def forward(self, x):
                return self.me(x)
        a(1)
        Loop()(x)
    """)
    assert found.has("scaler.update")


def test_comparable():
    def events(text):
        paths = script(text).paths
        return {event.name: event for event in paths[0] if event.name in STEP and event.what != "read"}

    alike = events("if use_amp:\n    scaler.scale(loss)\nscaler.update()")
    assert comparable(alike["scale"], alike["update"])
    apart = events("if use_amp:\n    scaler.scale(loss)\nif cfg.fp16:\n    scaler.update()")
    assert not comparable(apart["scale"], apart["update"])


def test_before_is_what_the_module_made():
    found = script("def f(loss):\n    scaler.scale(loss).backward()\n    opt.step()")
    path = next(path for path in found.paths if getattr(path.root, "name", "") == "f")
    assert {event.result.kind for event in path.before if event.what == "make"} == {"scaler", "module", "optimizer"}


# -- values --


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("y = torch.ones(3).half()", {"fp16"}),
        ("y = torch.ones(3).to(torch.bfloat16)", {"bf16"}),
        ("y = torch.ones(3)", {"fp32"}),
        ("y = torch.ones(3).half() + torch.ones(3)", {"fp32"}),
        ("y = torch.ones(3).half() * 2", {"fp16"}),
        ("y = torch.ones(3).half().float()", {"fp32"}),
        ("y = torch.arange(4)", {"int"}),
        ("y = torch.ones(3).half() > 0", {"bool"}),
        ("y = unknown(3)", set()),
        ("y = torch.ones(3).half().to(net(x).dtype)", set()),
        ("with torch.autocast('cuda', dtype=torch.float16):\n    y = net(x)", {"fp16"}),
        ("with torch.autocast('cuda', dtype=torch.float16):\n    y = x @ x", {"fp16"}),
        ("with torch.autocast('cuda', dtype=torch.float16):\n    y = (x @ x).softmax(-1)", {"fp32"}),
        ("with torch.autocast('cpu', dtype=torch.float16):\n    y = (x @ x).softmax(-1)", {"fp16"}),
        ("with torch.autocast('cuda', dtype=torch.float16):\n    y = torch.exp(net(x))", {"fp32"}),
        ("net.half()\ny = net(x)", {"fp16"}),
        ("d = torch.bfloat16 if ok() else torch.float16\ny = torch.ones(2).to(d)", {"fp16", "bf16"}),
        ("d = {'h': torch.float16}['h']\ny = torch.ones(2, dtype=d)", {"fp16"}),
        ("d = getattr(torch, 'bfloat16')\ny = torch.ones(2, dtype=d)", {"bf16"}),
    ],
)
def test_formats_of_values(text, formats):
    value = worth(f"{text}\nshow(y)")
    assert (value.formats if isinstance(value, Tensor) else set()) == formats


@pytest.mark.parametrize(
    ("text", "tags", "missing"),
    [
        ("y = nn.functional.mse_loss(net(x), t)", {"forward", "loss"}, {"scaled", "divided"}),
        ("y = scaler.scale(nn.functional.mse_loss(net(x), t) / 4)", {"scaled", "divided", "loss"}, set()),
        ("y = nn.functional.mse_loss(net(x), t) * 0.25", {"divided"}, set()),
        ("y = nn.functional.mse_loss(net(x), t) + net(x).mean() / 4", {"forward"}, {"divided"}),
        ("y = scaler.scale(net(x)) / scaler.get_scale()", {"forward"}, {"scaled", "divided"}),
        ("y = net(x).item()", {"number"}, set()),
        ("y = torch.tensor(net(x).item())", {"rebuilt", "detached"}, set()),
        ("y = torch.sigmoid(net(x))", {"probability"}, set()),
        ("y = net(x).detach()", {"detached", "forward"}, set()),
        ("y = torch.linspace(0, 1000, 50) - 3", {"grid"}, {"long grid"}),
        ("y = torch.arange(100)", {"literal"}, {"grid"}),
    ],
)
def test_tags_of_values(text, tags, missing):
    value = worth(f"{text}\nshow(y)")
    assert tags <= value.tags
    assert not missing & value.tags


def test_constants_are_computed():
    assert worth("y = 1.0 - 1e-4\nshow(y)") == Const(1 - 1e-4)
    assert worth("N = 4\ny = -(2 ** N)\nshow(y)") == Const(-16)
    assert worth("y = float('-inf')\nshow(y)") == Const(float("-inf"))


def test_scales_know_how_many_updates_came_before():
    found = script("before = scaler.get_scale()\nscaler.update()\nshow(before, scaler.get_scale())")
    shown = next(event for event in found.sites if event.name == "show")
    assert [(type(value), value.updates) for value in shown.args] == [(Scale, 0), (Scale, 1)]


def test_a_checkpoint_is_a_table_that_grows():
    found = script("""
        state = {"net": net.state_dict()}
        state["scaler"] = scaler.state_dict()
        torch.save(state, path)
    """)
    (saved,) = [event.args[0] for event in found.sites if event.what == "save"]
    assert isinstance(saved, Table)
    assert [key for key, _ in saved.pairs] == ["net", "scaler"]
    assert saved.get("scaler").type == "scaler.state_dict"


def test_gradients_are_told_from_values():
    found = script("""
        loss.backward()
        total = sum(p.grad.norm() for p in net.parameters())
        for p in net.parameters():
            p.grad.mul_(0.5)
            p.grad = None
    """)
    names = [event.what for event in found.paths[0] if event.what.startswith("gradient") or "zero_grad" in event.what]
    assert names[0] == "gradient.read"
    assert "gradient.write" in names
    assert names[-1] == "optimizer.zero_grad"


def test_a_replaced_layer_is_seen():
    found = script("net.fc = nn.Linear(4, 3)\nbody = nn.Sequential(net)\nbody[0] = nn.Linear(1, 1)")
    assert [event.name for event in found.paths[0] if event.what == "replace"] == ["fc", "[]"]


def test_sklearn_is_no_gradient_scaler():
    found = script(
        """
        from sklearn.preprocessing import StandardScaler
        def fit(scaler, x):
            scaler.fit(x)
            return scaler.transform(x)
        fit(StandardScaler(), data)
    """,
        head="",
    )
    assert not any(event.what.startswith("scaler.") for event in found.sites)


def test_places_count_characters():
    found = script("s = 'ä€'; opt.step()", head=HEAD)
    span = found.span(site(found, "optimizer.step").node)
    assert found.lines[span.line - 1][span.column : span.end_column] == "opt.step()"


# -- what both sides of a condition leave behind --


def test_a_condition_answers_its_opposite():
    found = orders("""
        def train(loss, gs):
            if other is None:
                loss.backward()
            if other is not None:
                opt.step()
        train(loss, scaler)
    """)
    assert found == [["backward"], ["step"]]


def test_a_value_after_a_condition_may_be_either():
    assert worth("y = torch.ones(2)\nif verbose:\n    y = y.half()\nshow(y)").formats == {"fp16", "fp32"}
    assert worth("y = torch.ones(2)\nif verbose:\n    y = y.half()\nelse:\n    y = y.half()\nshow(y)").formats == {
        "fp16"
    }


def test_none_gives_way_to_what_else_it_may_be():
    for text in ("y = torch.ones(2) if verbose else None", "y = None if verbose else torch.ones(2)"):
        assert worth(f"{text}\nshow(y)").formats == {"fp32"}


def test_what_a_handler_returns_is_no_result_of_a_step():
    value = worth("""
        def read(x):
            try:
                y = x.half()
            except ValueError:
                return x.double()
            return y
        show(read(torch.ones(2)))
    """)
    assert value.formats == {"fp16"}


def test_the_else_of_a_loop_is_left_out_after_a_break():
    text = """
        for x in batches:
            loss.backward()
            {}
        else:
            opt.step()
    """
    assert orders(text.format("break")) == [["backward"]]
    assert orders(text.format("continue")) == [["backward", "backward", "step"]]


def test_a_term_that_is_divided_does_not_divide_the_loss():
    for sign in "+-":
        value = worth(f"y = nn.functional.mse_loss(net(x), t) {sign} net(x).mean() / 4\nshow(y)")
        assert "divided" not in value.tags
    assert "divided" in worth("y = net(x).mean() / 4 - net(x).mean() / 4\nshow(y)").tags


def test_a_region_that_a_function_leaves_open_ends_with_it():
    found = script("""
        def run(x):
            region = torch.autocast("cuda", dtype=torch.float16)
            region.__enter__()
            return net(x)
        run(x)
        net(x)
    """)
    assert [event.region is not None for event in found.paths[0] if event.what == "forward"] == [True, False]
