"""Every rule is tested by its own examples, and keeps the shape that its page and the reports need."""

import ast
import re

import pytest

from halfstep.lint.check import check_source
from halfstep.lint.rules import all_rules

BAD = [pytest.param(rule, text, id=f"{rule.code}-{n}") for rule in all_rules() for n, text in enumerate(rule.bad)]
GOOD = [pytest.param(rule, text, id=f"{rule.code}-{n}") for rule in all_rules() for n, text in enumerate(rule.good)]
MARK = re.compile(r"  # (HS\d{3})$", re.M)


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_bad_example_is_found_at_its_line_and_nothing_else_is(rule, text):
    marked = [number for number, line in enumerate(text.splitlines(), 1) if MARK.search(line)]
    assert marked, "a bad example marks its line"
    found = [(finding.line, finding.code) for finding in check_source(MARK.sub("", text), "bad.py", all_rules())]
    assert found == [(line, rule.code) for line in marked]


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_good_example_is_silent_for_every_rule(rule, text):
    assert [f"{f.line} {f.code} {f.message}" for f in check_source(text, "good.py", all_rules())] == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_shape_of_a_rule(rule):
    assert re.fullmatch(r"HS[1234]\d\d", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert len(rule.bad) >= 2
    assert len(rule.good) >= 2
    assert re.search(r"\d", rule.why), "a reason has numbers"
    assert rule.summary.endswith(".")
    for text in (*rule.bad, *rule.good):
        ast.parse(text)


def test_codes_and_names_are_unique():
    rules = all_rules()
    assert len({rule.code for rule in rules}) == len(rules) == len({rule.name for rule in rules})
