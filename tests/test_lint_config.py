"""DeepSpeed configurations in JSON and Python, with the place of every entry."""

import ast
import json

import pytest

from halfstep.lint.config import Config, check_config, configs_of
from halfstep.lint.rules import all_rules
from halfstep.lint.script import Script

BOTH = {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}}


def found(text):
    return [(finding.line, finding.column, finding.code) for finding in check_config(text, "ds.json", all_rules())]


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_places_are_those_of_the_file(indent):
    text = json.dumps(BOTH, indent=indent)
    ((line, column, code),) = found(text)
    assert code == "HS174"
    assert text.splitlines()[line - 1][column - 1 :].startswith('"bf16"')


@pytest.mark.parametrize("before", ["", "\n\n", "  ", "\ufeff", "\t\n "])
def test_what_stands_before_the_first_bracket_does_not_matter(before):
    text = before + json.dumps(BOTH)
    ((line, column, _),) = found(text)
    text = text.removeprefix("\ufeff")
    assert text.splitlines()[line - 1][column - 1 :].startswith('"bf16"')


@pytest.mark.parametrize(
    "data",
    [
        [],
        3,
        {},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},  # anybody's
        {"train_batch_size": 8},
        BOTH | {"bf16": {"enabled": "auto"}},
        BOTH | {"bf16": {"enabled": False}},
        BOTH | {"bf16": True},
        BOTH | {"bf16": None},
    ],
)
def test_silence(data):
    assert found(json.dumps(data)) == []


def test_what_is_no_json_is_said():
    with pytest.raises(ValueError, match="Expecting"):
        check_config("{'fp16': 1}", "ds.json", all_rules())


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"loss_scale": 128}, "loss_scale"),
        ({"loss_scale": 0, "loss_scale_window": 0}, "loss_scale_window"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"min_loss_scale": -1.0}, "min_loss_scale"),
        ({"loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1}, None),
        ({"loss_scale": "auto"}, None),
        ({"loss_scale": True}, None),
    ],
)
def test_the_loss_scale(section, key):
    text = json.dumps({"train_batch_size": 8, "fp16": {"enabled": True} | section}, indent=1)
    places = found(text)
    assert [code for _, _, code in places] == ([] if key is None else ["HS175"])
    for line, column, _ in places:
        assert text.splitlines()[line - 1][column - 1 :].startswith(f'"{key}"')
    assert found(json.dumps({"train_batch_size": 8, "fp16": {"enabled": False} | section})) == []


def test_a_dict_in_python_and_what_is_no_literal():
    text = "c = {'zero_optimization': {}, 'fp16': {'enabled': flag}, 'bf16': {'enabled': True}, **more}"
    (config,) = configs_of(Script(text, "x.py"))
    assert config.is_on("bf16")
    assert not config.is_on("fp16")
    assert config.get("fp16", "enabled") is None
    assert config.get("zero_optimization") == {}
    assert config.key("fp16", "loss_scale") is None
    assert config.key("bf16", "enabled", "deeper") is None


def test_words_of_json():
    config = Config(ast.parse('{"a": true, "b": false, "c": null, "d": -1.5}', mode="eval").body)
    assert [config.get(name) for name in "abcd"] == [True, False, None, -1.5]
