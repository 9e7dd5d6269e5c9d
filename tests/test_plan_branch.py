"""Which answer to a condition goes on, by the bytecode of who asks."""

import sys

import pytest
from reference.plan_assertions import both, negated, plain

from halfstep.plan.branch import healthy_answer, is_in_while


class Condition:
    """Says what the branch analysis finds each time it is asked, and answers with it."""

    def __init__(self):
        self.found = []
        self.in_while = []

    def __bool__(self):
        frame = sys._getframe(1)
        self.found.append(healthy_answer(frame))
        self.in_while.append(is_in_while(frame))
        return bool(self.found[-1])

    def item(self):
        frame = sys._getframe(1)
        self.found.append(healthy_answer(frame))
        return bool(self.found[-1])


def raises(c):
    if c:
        raise ValueError("bad", [1, 2], {"a": str(c)})


def raises_unless(c):
    if not c:
        raise ValueError


def raises_else(c):
    if c:
        return 1
    else:  # noqa: RET505
        raise ValueError


def either(c):
    if c or c:
        raise ValueError


def called(c):
    if not c.item():
        raise ValueError


def branches(c):
    return 1 if c else 2


def stored(c):
    value = not c
    return value  # noqa: RET504


def negated_value(c):
    return not c and c.found


def nested(c):
    if c:
        if len(c.found) > 5:
            raise ValueError
        return 1
    return 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, [True]),
        (negated, [False]),
        (raises, [False]),
        (raises_unless, [True]),
        (raises_else, [True]),
        (both, [True, True]),
        (either, [False, False]),
        (called, [True]),
        (branches, [None]),
        (stored, [None]),
        (negated_value, [None]),
        (nested, [None]),
    ],
)
def test_the_answer_that_does_not_raise_is_found(function, expected):
    condition = Condition()
    function(condition)
    assert condition.found == expected


def loops(c):
    while len(c.in_while) < 3:
        if c:
            break


def iterates(c):
    for _ in range(3):
        if c:
            break


def iterates_within(c):
    while len(c.in_while) < 3:
        for _ in range(3):
            if c:
                break


def after(c):
    while len(c.in_while) < 0:
        pass
    return bool(c) or 1 if c else 2


@pytest.mark.parametrize(
    ("function", "expected"), [(loops, True), (iterates, False), (iterates_within, False), (after, False)]
)
def test_a_question_in_a_loop_without_an_iterator_is_told_apart(function, expected):
    condition = Condition()
    function(condition)
    assert set(condition.in_while) == {expected}
