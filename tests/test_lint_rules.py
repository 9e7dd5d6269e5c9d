"""Every rule is tested by its own examples, and keeps the shape that its page and the reports need."""

import ast
import difflib
import re

import pytest

from halfstep.lint.check import check_source
from halfstep.lint.fix import fix_source
from halfstep.lint.rules import all_rules

BAD = [pytest.param(rule, text, id=f"{rule.code}-{n}") for rule in all_rules() for n, text in enumerate(rule.bad)]
GOOD = [pytest.param(rule, text, id=f"{rule.code}-{n}") for rule in all_rules() for n, text in enumerate(rule.good)]
MARK = re.compile(r"  # (HS\d{3})$", re.M)


def lint(text, file):
    return check_source(text, file, all_rules())


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_bad_example_is_found_at_its_line_and_nothing_else_is(rule, text):
    marked = [number for number, line in enumerate(text.splitlines(), 1) if MARK.search(line)]
    assert marked, "a bad example marks its line"
    found = [(finding.line, finding.code) for finding in lint(MARK.sub("", text), "bad.py")]
    assert found == [(line, rule.code) for line in marked]


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_good_example_is_silent_for_every_rule(rule, text):
    assert [f"{f.line} {f.code} {f.message}" for f in lint(text, "good.py")] == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_declared_fix_mends_an_example_and_no_other_is_offered(rule):
    fixed = [fix_source(MARK.sub("", text), "bad.py", lint, unsafe=True) for text in rule.bad]
    mended = [each for each in fixed if each.applied]
    assert bool(mended) == (rule.fix is not None)
    assert [each.refused for each in fixed if each.refused] == []
    assert not mended or any(lint(each.text, "bad.py") == [] for each in mended)
    classes = {finding.fix for each in mended for finding in each.applied}
    assert rule.fix == ("unsafe" if "unsafe" in classes else "safe" if classes else None), "the page has the worst"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_first_good_example_is_the_first_bad_one_corrected(rule):
    bad, good = MARK.sub("", rule.bad[0]).splitlines(), rule.good[0].splitlines()
    assert difflib.SequenceMatcher(None, bad, good, autojunk=False).ratio() >= 0.5


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
