"""What the gradients of a step carry, and what waits for update, along the paths of small sources."""

import ast

import pytest

from halfstep.lint.script import Script
from halfstep.lint.step import (
    called_on,
    divides_by_scale,
    follow,
    frame_of,
    handed,
    held_by,
    is_abandoned,
    is_off,
    left_early,
    optimizer_of,
    pair_of,
    place,
    scaler_name,
    since,
)

HEAD = """\
import torch
from torch import nn

net = nn.Linear(8, 1)
other = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
opt_b = torch.optim.SGD(other.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
loss = nn.functional.mse_loss(net(x), y)
"""
"""Nine lines; what is appended begins in line 10."""


def script(body):
    return Script(HEAD + body, "source.py")


def at(source, line, what, path=0):
    """The event ``what`` in ``line`` of a path, with the step as it stood then, copied by asking at once."""
    for event, step in follow(source.paths[path]):
        if event.what == what and event.node.lineno == line:
            return event, step
    raise AssertionError(f"no {what} in line {line}")


def carried(body, line, what="clip"):
    """The lines of the scaled backward passes that the gradients of ``opt`` and of an unknown optimizer carry."""
    event, step = at(script(body), line, what)
    owner = step.owners(event.argument("parameters", 0))
    found = (step.carried(event, owner[0]), step.carried(event, None))
    return tuple(None if backward is None else backward.node.lineno for backward in found)


CLIP = "nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"


def test_gradients_carry_the_scale_after_a_scaled_backward_pass():
    assert carried("scaler.scale(loss).backward()\n" + CLIP, 11) == (10, 10)


@pytest.mark.parametrize(
    "line",
    [
        "scaler.unscale_(opt)",
        "scaler.step(opt)",
        "opt.zero_grad()",
        "net.zero_grad()",
        "scaler.unscale_(self_made_optimizer)",
        "for p in net.parameters(): p.grad.div_(scaler.get_scale())",
        "for p in net.parameters(): p.grad *= 1.0 / scaler.get_scale()",
        "unseen(scaler)",
        "unscale_all(net)",
        "unseen(net.parameters(), scaler.get_scale())",
    ],
)
def test_what_takes_the_scale_out_or_may(line):
    assert carried(f"scaler.scale(loss).backward()\n{line}\n" + CLIP, 12) == (None, None)


@pytest.mark.parametrize(
    "line",
    ["print(loss)", "nonsense(net)", "loss.item() / scaler.get_scale()", "torch.save(scaler, path)", "y.mul_(2)"],
)
def test_what_leaves_the_scale_in(line):
    assert carried(f"scaler.scale(loss).backward()\n{line}\n" + CLIP, 12) == (10, 10)


def test_unscaling_another_optimizer_leaves_the_scale_in_but_an_unknown_one_is_given_the_benefit():
    assert carried("scaler.scale(loss).backward()\nscaler.unscale_(opt_b)\n" + CLIP, 12) == (10, None)


def test_plain_backward_and_a_scaler_that_is_off_leave_nothing():
    assert carried("loss.backward()\n" + CLIP, 11) == (None, None)
    off = 'off = torch.amp.GradScaler("cuda", enabled=False)\noff.scale(loss).backward()\n' + CLIP
    assert carried(off, 12) == (None, None)


def test_events_under_two_settings_are_not_held_against_each_other():
    body = "if amp:\n    scaler.scale(loss).backward()\nif fp16:\n    " + CLIP
    assert carried(body, 13) == (None, None)
    assert carried("if amp:\n    scaler.scale(loss).backward()\n    " + CLIP, 12) == (11, 11)


def test_branch_of_the_same_setting_skips_nothing():
    body = "if fast:\n    scaler.scale(loss).backward()\n    " + CLIP + "else:\n    scaler.unscale_(opt)\n"
    assert carried(body, 12) == (11, 11)


def test_scaler_of_accelerate_is_driven_by_it():
    body = "from accelerate import Accelerator\nscaler = Accelerator().scaler\nscaler.scale(loss).backward()\n" + CLIP
    assert carried(body, 13) == (None, None)


def test_path_that_goes_round_an_unscale_of_another_setting_is_not_believed():
    body = "scaler.scale(loss).backward()\nif amp:\n    scaler.unscale_(opt)\n" + CLIP
    source = script(body)
    taken = {path.decisions[0].taken: index for index, path in enumerate(source.paths) if path.decisions}
    event, step = at(source, 13, "clip", taken[False])
    assert step.carried(event, None) is None


def test_stepwise_condition_round_an_unscale_is_believed_unless_the_event_has_one_of_its_own():
    body = "for i in steps:\n    scaler.scale(loss).backward()\n    if i % 4 == 3:\n        scaler.unscale_(opt)\n    "
    together = script(body + CLIP)
    apart = script(body + "if late:\n        pass\n    if due(i) > 0:\n        " + CLIP)
    assert any(_carried_anywhere(together, 14))
    assert not any(_carried_anywhere(apart, 17))


def _carried_anywhere(source, line):
    for path in source.paths:
        for event, step in follow(path):
            if event.what == "clip" and event.node.lineno == line:
                yield step.carried(event, None) is not None


def test_waiting_pairs_until_update():
    source = script(
        "scaler.scale(loss).backward()\nscaler.unscale_(opt)\nscaler.step(opt)\nscaler.update()\nprint(loss)\n"
    )
    event, step = at(source, 12, "scaler.step")
    pair = pair_of(event)
    assert list(step.unscaled) == [pair]
    assert step.stepped == {}
    assert step.began[pair].node.lineno == 10
    _, step = at(source, 13, "scaler.update")
    assert list(step.stepped) == [pair]
    _, step = at(source, 14, "call")
    assert step.unscaled == step.stepped == {}


def test_scaler_built_anew_waits_for_nothing():
    made = "    s = torch.amp.GradScaler('cuda')\n"
    loop = "for fold in folds:\n    s.unscale_(opt)\n"
    for body, waiting in ((loop.replace("\n", "\n" + made, 1), [0, 0]), (made.strip() + "\n" + loop, [0, 1])):
        steps = [len(step.unscaled) for event, step in follow(script(body).paths[0]) if event.what == "scaler.unscale_"]
        assert steps == waiting


def test_loop_over_optimizers_serves_another_one_in_each_turn():
    body = "opts = [torch.optim.SGD(n.parameters()) for n in nets]\nfor o in opts:\n    scaler.step(o)\n"
    pairs = {pair_of(e) for e in script(body).paths[0] if e.what == "scaler.step"}
    assert len(pairs) == 2
    assert None not in pairs


def test_optimizer_that_is_not_known_makes_no_pair():
    (event,) = (e for e in script("scaler.step(optimizers[n])\n").paths[0] if e.what == "scaler.step")
    assert optimizer_of(event) is None
    assert pair_of(event) is None


def test_by_hand_until_update():
    body = "for p in net.parameters(): p.grad.mul_(1 / scaler.get_scale())\nscaler.update()\nprint(loss)\n"
    source = script(body)
    assert at(source, 11, "scaler.update")[1].by_hand
    assert not at(source, 12, "call")[1].by_hand


def test_operations_with_the_scale():
    source = script("scaled = loss * scaler.get_scale()\nshown = loss / scaler.get_scale()\nhalf = loss / 2\n")
    operators = {event.node.lineno: event for event in source.paths[0] if event.what == "operator"}
    assert divides_by_scale(operators[10])
    assert not divides_by_scale(operators[11])
    assert not divides_by_scale(operators[12])


HELPER = (
    """\
def clip():
    """
    + CLIP
    + """    scaler.step(opt)

def train():
    for x in data:
        scaler.scale(loss).backward()
        clip()
"""
)


def test_place_is_the_call_of_the_helper_in_the_function_of_the_anchor():
    source = script(HELPER)
    path = next(path for path in source.paths if any(event.what == "clip" for event in path))
    backward = next(event for event in path if event.what == "backward")
    clip = next(event for event in path if event.what == "clip")
    step = next(event for event in path if event.what == "scaler.step")
    assert place(clip, backward).lineno == 17
    assert place(clip, step) is clip.node
    assert frame_of(clip, backward) == backward.calls
    assert (called_on(source, step), handed(source, step)) == ("scaler", "opt")
    assert scaler_name(source, backward) == "scaler"
    assert called_on(source, clip) == "nn.utils"


def _between(body, path):
    source = script("for i in steps:\n    scaler.unscale_(opt)\n" + body)
    events = source.paths[path].events
    first = next(event for event in events if event.what == "scaler.unscale_")
    return source, since(source.paths[path], first, len(events)), first


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("    if norm > 5:\n        continue\n    scaler.update()\n", 13),
        ("    if norm > 5:\n        break\n    scaler.update()\n", None),
        ("    if (i + 1) % 4:\n        continue\n    scaler.update()\n", None),
        ("    if i % 9 == 0 and norm > 5:\n        continue\n    scaler.update()\n", 13),
    ],
)
def test_left_early(body, line):
    found = []
    for path in range(len(script("for i in steps:\n    scaler.unscale_(opt)\n" + body).paths)):
        _, between, first = _between(body, path)
        left = left_early(between, first)
        found += [] if left is None else [left.node.lineno]
        assert is_abandoned(between, first) == (left is not None)
    assert set(found) == ({line} if line else set())


def test_step_whose_gradients_are_zeroed_before_the_next_pass_is_abandoned():
    _, between, first = _between("    opt.zero_grad()\n    scaler.scale(loss).backward()\n", 0)
    assert is_abandoned(between, first)
    _, between, first = _between("    scaler.scale(loss).backward()\n    opt.zero_grad()\n", 0)
    turn = between[: [event.what for event in between].index("again")]
    assert not is_abandoned(turn, first)


def test_objects():
    source = script(
        'off = torch.amp.GradScaler("cuda", enabled=False)\nbig = torch.optim.SGD([{"params": net.parameters()}])\n'
    )
    made = {event.node.lineno: event.result for event in source.paths[0] if event.what == "make"}
    assert is_off(made[10])
    assert not is_off(made[8])
    assert held_by(made[11]) == {made[4].ident}
    assert isinstance(made[4].node, ast.Call)
