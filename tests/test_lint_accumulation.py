"""Which loops accumulate gradients, over how many micro-batches, and what ends a window."""

import ast
import textwrap

import pytest

from halfstep.lint.accumulation import in_turn, turns, windows
from halfstep.lint.script import Script

LOOP = """
import torch
from torch import nn

def train(net, loader, opt, n, args, enough, norm):
    for i, (x, y) in enumerate(loader):
        nn.functional.mse_loss(net(x), y).backward()
        {before}
        if {condition}:
            opt.step()
            opt.zero_grad()
"""


def windows_of(text):
    return windows(Script(textwrap.dedent(text), "x.py"))


@pytest.mark.parametrize(
    ("condition", "length", "has_rest"),
    [
        ("(i + 1) % n == 0", "n", False),
        ("i % n == n - 1", "n", False),
        ("0 == (i + 1) % n", "n", False),
        ("not (i + 1) % n", "n", False),
        ("(i + 1) % args.accum == 0", "args.accum", False),
        ("(i + 1) % 4 == 0 or i + 1 == len(loader)", "4", True),
        ("enough and (i + 1) % n == 0", "n", False),
        ("not ((i + 1) % n != 0 and i + 1 != len(loader))", "n", True),
        ("not ((i + 1) % n > 0 or enough)", "n", False),
    ],
)
def test_condition_that_ends_a_window(condition, length, has_rest):
    (window,) = windows_of(LOOP.format(condition=condition, before="pass"))
    assert ast.unparse(window.length) == length
    assert window.period.has_rest is has_rest
    assert window.loop.lineno == 6
    assert window.ends.lineno == 9
    assert {event.node.lineno for event in window.backwards} == {7}


@pytest.mark.parametrize(
    ("before", "condition"),
    [
        ("is_end = (i + 1) % n == 0", "is_end"),
        ("inside = (i + 1) % n", "not inside"),
        ("inside = (i + 1) % n != 0", "not inside"),
    ],
)
def test_condition_under_a_name(before, condition):
    (window,) = windows_of(LOOP.format(condition=condition, before=before))
    assert ast.unparse(window.length) == "n"


@pytest.mark.parametrize(
    ("before", "condition"),
    [
        ("pass", "i > 10"),
        ("pass", "i == n"),  # happens once, and not again and again
        ("pass", "(i + 1) % n != 0"),  # steps within the window and not at its end
        ("pass", "norm < 1"),
        ("is_end = (i + 1) % n == 0; is_end = enough", "is_end"),
    ],
)
def test_condition_that_ends_no_window(before, condition):
    assert windows_of(LOOP.format(condition=condition, before=before)) == ()


def test_counter_that_is_reset():
    text = """
    import torch

    def train(net, loader, opt, size):
        pending = 0
        for x in loader:
            net(x).mean().backward()
            pending += 1
            if pending {comparison} size:
                opt.step()
                opt.zero_grad()
                {reset}
    """
    for comparison in ("==", ">="):
        (window,) = windows_of(text.format(comparison=comparison, reset="pending = 0"))
        assert ast.unparse(window.length) == "size"
        assert not window.period.has_rest
    assert windows_of(text.format(comparison="==", reset="pass")) == ()


def test_counter_with_a_known_length_is_not_counted_out():
    # Two turns of the loop are followed: a count of 0, 1, 2 would never come to 8.
    (window,) = windows_of("""
    import torch

    EVERY = 8

    class Job:
        def __init__(self, net):
            self.net, self.count = net, 0
            self.opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def batch(self, x):
            self.net(x).mean().backward()
            self.count += 1
            if self.count % EVERY == 0:
                self.opt.step()
                self.opt.zero_grad()
    """)
    assert window.loop is None
    assert ast.unparse(window.length) == "EVERY"


def test_early_continue_within_the_window():
    (window,) = windows_of("""
    import torch

    def train(net, loader, opt, scaler, n):
        for i, x in enumerate(loader):
            scaler.scale(net(x).mean()).backward()
            if (i + 1) % n != 0:
                continue
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    """)
    assert window.ends.lineno == 7
    assert not window.period.at_end
    assert all(turn.has_backward and not turn.has_step for turn in window.idle)
    assert any(turn.has_step for turn in window.stepping)


def test_step_in_a_method_that_the_loop_calls():
    (window,) = windows_of("""
    import torch

    class Job:
        def __init__(self, net, n):
            self.net, self.n = net.cuda(), n
            self.opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def maybe_step(self, i):
            if (i + 1) % self.n:
                return
            self.opt.step()
            self.opt.zero_grad()

        def train(self, loader):
            for epoch in range(3):
                for i, x in enumerate(loader):
                    self.net(x).mean().backward()
                    self.maybe_step(i)
    """)
    assert window.loop.lineno == 17
    assert ast.unparse(window.length) == "self.n"


def test_loop_that_is_the_window():
    text = """
    import torch

    def train(net, batches, opt, {size}):
        for step in range(100):
            opt.zero_grad()
            for part in {parts}:
                net(part).mean().backward()
            opt.step()
    """
    for size, parts, length in [
        ("accumulate", "range(accumulate)", "accumulate"),
        ("micro_batches", "micro_batches", "len(micro_batches)"),
        ("micro_batches", "enumerate(micro_batches)", "len(micro_batches)"),
    ]:
        (window,) = windows_of(text.format(size=size, parts=parts))
        assert (window.loop.lineno, window.ends, ast.unparse(window.length)) == (7, None, length)
    # The losses of several tasks are a sum on purpose.
    assert windows_of(text.format(size="tasks", parts="tasks")) == ()


def test_a_step_for_every_backward_is_no_window():
    assert (
        windows_of("""
    import torch

    def train(gen, critic, loader, g_opt, c_opt, ratio):
        for i, real in enumerate(loader):
            critic(real).mean().backward()
            c_opt.step()
            c_opt.zero_grad()
            if i % ratio == 0:
                gen(real).mean().backward()
                g_opt.step()
                g_opt.zero_grad()
    """)
        == ()
    )


def test_a_step_in_another_loop_does_not_end_a_window():
    assert (
        windows_of("""
    import torch

    def train(net, micro_batches, loader, opt):
        for part in micro_batches:
            net(part).mean().backward()
        for x in loader:
            opt.zero_grad()
            net(x).mean().backward()
            opt.step()
    """)
        == ()
    )


def test_skipping_every_nth_batch_is_no_window():
    assert (
        windows_of("""
    import torch

    def train(net, loader, opt, n):
        for i, x in enumerate(loader):
            net(x).mean().backward()
            if (i + 1) % n == 0:
                continue
            opt.step()
            opt.zero_grad()
    """)
        == ()
    )


def test_a_condition_around_the_loop_ends_no_window_within_it():
    text = """
    import torch

    def train(net, loader, opt, n):
        for epoch in range(10):
            if epoch % n == 0:
                for x in loader:
                    loss = net(x).mean()
                    loss.backward()
                    if torch.isfinite(loss):
                        opt.step()
                        opt.zero_grad()
    """
    assert windows_of(text) == ()


def test_step_in_a_loop_of_its_own_at_the_end_of_a_window():
    (window,) = windows_of("""
    import torch

    def train(net, loader, opt, n):
        for i, x in enumerate(loader):
            net(x).mean().backward()
            if (i + 1) % n == 0:
                for _ in range(2):
                    opt.step()
                opt.zero_grad()
    """)
    assert window.loop.lineno == 5


def test_optimizer_of_a_framework_is_left_to_it():
    assert (
        windows_of("""
    import torch
    from accelerate import Accelerator

    def train(net, loader, n):
        accelerator = Accelerator()
        net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i, x in enumerate(loader):
            net(x).mean().backward()
            if (i + 1) % n == 0:
                opt.step()
    """)
        == ()
    )


def test_turns_hold_the_inner_loops_and_places_are_in_the_loop():
    script = Script(
        textwrap.dedent("""
    import torch

    def finish(opt):
        opt.step()

    def train(net, loader, opt):
        for x in loader:
            for part in x.chunk(2):
                net(part).mean().backward()
            finish(opt)
    """),
        "x.py",
    )
    found = [turn for path in script.paths for turn in turns(path) if turn.loop is not None and turn.loop.lineno == 8]
    assert [turn.has_backward and turn.has_step for turn in found] == [True] * len(found)
    (step, *_) = [event for event in found[0].events if event.what == "optimizer.step"]
    assert (step.node.lineno, in_turn(step, found[0].loop).lineno) == (5, 11)
