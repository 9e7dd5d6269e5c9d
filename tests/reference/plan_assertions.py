"""Functions with assertions as Python compiles them; pytest rewrites those of a test file."""


def plain(condition):
    assert condition


def negated(condition):
    assert not condition, f"with a message {condition!r}"


def both(condition):
    assert condition and condition  # noqa: PT018


def asserts_bounds(x):
    assert x.max() < 3, f"too large: {x.max()}"
    assert (x >= 0).all() and not (x > 5).any()  # noqa: PT018
    return x
