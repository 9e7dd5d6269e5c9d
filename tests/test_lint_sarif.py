"""SARIF 2.1.0: the keys that the standard and GitHub require, and no other; results that are known again."""

import json

import pytest

from halfstep.lint import catalogue, sarif
from halfstep.lint.finding import Finding
from halfstep.lint.report import LintReport, source_lines
from halfstep.lint.rule import Rule

TEXT = "import torch\nclip()\nclip()\nstep()\n"

# Object to the keys that it must have and those that it may have, of those that we write; from the standard.
SHAPE = {
    "sarifLog": ({"version", "runs"}, {"$schema"}),
    "run": ({"tool", "results"}, {"columnKind", "originalUriBaseIds", "invocations"}),
    "tool": ({"driver"}, set()),
    "toolComponent": ({"name", "rules"}, {"semanticVersion"}),
    "reportingDescriptor": (
        {"id", "name", "shortDescription", "fullDescription", "help", "defaultConfiguration"},
        {"properties"},
    ),
    "multiformatMessageString": ({"text"}, {"markdown"}),
    "message": ({"text"}, set()),
    "result": ({"ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"}, {"fixes"}),
    "location": ({"physicalLocation"}, {"logicalLocations"}),
    "logicalLocation": ({"name"}, set()),
    "physicalLocation": ({"artifactLocation", "region"}, set()),
    "artifactLocation": ({"uri"}, {"uriBaseId"}),
    "region": ({"startLine"}, {"startColumn", "endLine", "endColumn"}),
    "fix": ({"artifactChanges", "description"}, set()),
    "artifactChange": ({"artifactLocation", "replacements"}, set()),
    "replacement": ({"deletedRegion", "insertedContent"}, set()),
    "artifactContent": ({"text"}, set()),
    "invocation": ({"executionSuccessful", "toolExecutionNotifications"}, set()),
    "notification": ({"message"}, {"level"}),
}
KINDS = {
    "runs": "run",
    "tool": "tool",
    "driver": "toolComponent",
    "rules": "reportingDescriptor",
    "shortDescription": "multiformatMessageString",
    "fullDescription": "multiformatMessageString",
    "help": "multiformatMessageString",
    "message": "message",
    "description": "message",
    "results": "result",
    "locations": "location",
    "logicalLocations": "logicalLocation",
    "physicalLocation": "physicalLocation",
    "artifactLocation": "artifactLocation",
    "region": "region",
    "deletedRegion": "region",
    "fixes": "fix",
    "artifactChanges": "artifactChange",
    "replacements": "replacement",
    "insertedContent": "artifactContent",
    "invocations": "invocation",
    "toolExecutionNotifications": "notification",
}


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    rules = tuple(
        Rule(code, name, severity, f"{name} is bad.", "Because.", ("clip()\n",), ("good()\n",), lambda _: iter(()))
        for code, name, severity in (
            ("HS101", "clip", "error"),
            ("HS303", "step", "warning"),
            ("HS309", "hint", "note"),
        )
    )
    monkeypatch.setattr(catalogue, "all_rules", lambda: rules)
    catalogue.catalogue.cache_clear()
    yield
    catalogue.catalogue.cache_clear()


def check(value, kind):
    required, allowed = SHAPE[kind]
    assert required <= value.keys() <= required | allowed, (kind, value.keys())
    for key, inner in value.items():
        for item in inner if isinstance(inner, list) else [inner]:
            if key in KINDS:
                check(item, KINDS[key])
            elif key in ("startLine", "startColumn", "endLine", "endColumn"):
                assert item >= 1
            elif key in ("level", "columnKind"):
                assert item in ("error", "warning", "note", "unicodeCodePoints")


def finding(line, code="HS101", file="src/train.py", **fields):
    severity = {"HS101": "error", "HS303": "warning", "HS309": "note"}[code]
    values = {"column": 1, "end_line": line, "end_column": 6, "message": "a mistake", "name": "clip", **fields}
    return Finding(file=file, line=line, code=code, severity=severity, **values)


def run_of(*findings, root, text=TEXT, mend=lambda finding: None):
    sources = {(found.file, found.cell): source_lines(text) for found in findings}
    log = json.loads(sarif.sarif(LintReport(findings, sources, num_files=1), root, mend))
    check(log, "sarifLog")
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    return run


def test_rules_and_results_belong_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_of(finding(4, "HS309"), finding(4, "HS303"), finding(2, end_line=3, end_column=4), root=tmp_path)
    rules = run["tool"]["driver"]["rules"]
    assert [(rule["id"], rule["defaultConfiguration"]) for rule in rules] == [
        ("HS101", {"level": "error"}),
        ("HS303", {"level": "warning"}),
        ("HS309", {"level": "note"}),
    ]
    severities = [rule["properties"]["problem.severity"] for rule in rules]
    assert severities == ["error", "warning", "recommendation"]
    assert run["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]
    assert rules[0]["shortDescription"] == {"text": "clip is bad."}
    assert rules[0]["help"]["markdown"].startswith("# clip (HS101)")
    results = run["results"]
    assert [(result["ruleId"], result["level"]) for result in results] == [
        ("HS101", "error"),
        ("HS303", "warning"),
        ("HS309", "note"),
    ]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in results)
    assert results[0]["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "src/train.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 2, "startColumn": 1, "endLine": 3, "endColumn": 5},
    }
    assert list(run["originalUriBaseIds"]) == ["%SRCROOT%"]


def test_nothing_found_is_a_run_without_results(tmp_path):
    run = run_of(root=tmp_path)
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])


def test_paths_are_uris(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    run = run_of(finding(1, file="my file#1.py"), finding(1, file="../../b.py"), root=tmp_path)
    places = [result["locations"][0]["physicalLocation"]["artifactLocation"] for result in run["results"]]
    assert places[0] == {"uri": "a/my%20file%231.py", "uriBaseId": "%SRCROOT%"}
    assert places[1] == {"uri": (tmp_path.parent / "b.py").as_uri()}


def fingerprints(*findings, root, text=TEXT):
    run = run_of(*findings, root=root, text=text)
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]


def test_a_finding_that_only_moved_is_known_again(tmp_path):
    before = fingerprints(finding(2), finding(3), finding(4, "HS303"), root=tmp_path)
    moved = fingerprints(
        finding(4, column=3),
        finding(5),
        finding(6, "HS303"),
        root=tmp_path,
        text="\n\nimport torch\n  clip()\nclip()\nstep()",
    )
    assert moved == before
    assert len(set(before)) == 3
    assert fingerprints(finding(2), root=tmp_path, text="import other\nclip()") == before[:1]
    assert fingerprints(finding(2), root=tmp_path, text="import torch\nclop()") != before[:1]
    assert fingerprints(finding(2, "HS303"), root=tmp_path) != before[:1]


def test_two_files_do_not_count_each_others_lines(tmp_path):
    first, second = fingerprints(finding(2), finding(2, file="src/other.py"), root=tmp_path)
    assert first == second


def apply(text, replacements):
    """What an editor makes of them: columns from 1, regions of the text as it was."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def offset(line, column):
        assert 1 <= line <= len(lines)
        assert 1 <= column <= len(lines[line - 1]) + 1
        return starts[line - 1] + column - 1

    for change in reversed(replacements):
        at = change["deletedRegion"]
        begin, end = offset(at["startLine"], at["startColumn"]), offset(at["endLine"], at["endColumn"])
        text = text[:begin] + change["insertedContent"]["text"] + text[end:]
    return text


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (TEXT, "import torch\nclip()\nstep()\n"),
        (TEXT, "import torch\nscaler.unscale_()\nclip()\nclip()\nstep()\nupdate()\n"),
        (TEXT, "from torch import nn\nclip()\nclip()\nstop()\n"),
        (TEXT, ""),
        ("a\nb", "a\nc"),
        ("a\nb", "a"),
        ("a\nb", "a\nb\nc"),
        ("a\nb", "a\nb\n"),
        ("a", "b"),
        ("a\n", "a"),
        ("a", "a\nb"),
        ("a\nb\n", "b\n"),
        ("", "a\n"),
    ],
)
def test_a_fix_replaces_lines(tmp_path, text, mended):
    run = run_of(finding(1, fix="safe"), root=tmp_path, text=text, mend=lambda finding: source_lines(mended))
    (fix,) = run["results"][0]["fixes"]
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"] == run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert apply(text, change["replacements"]) == mended
    assert "safe" in fix["description"]["text"]


def test_only_the_first_findings_carry_their_fix(tmp_path, monkeypatch):
    """Of a file with 3 characters, two can be opened."""
    monkeypatch.setattr(sarif, "MAX_CHARACTERS_OPENED", 8)
    asked = []
    findings = [finding(1), *(finding(line, fix="safe") for line in (1, 2, 3))]
    run = run_of(*findings, root=tmp_path, text="a\nb\nc\n", mend=lambda found: asked.append(found) or ["x"])
    assert ["fixes" in result for result in run["results"]] == [False, True, True, False]
    assert asked == findings[1:3]


def test_without_a_fix_or_a_mended_text_there_are_no_fixes(tmp_path):
    run = run_of(finding(1), finding(2, fix="unsafe"), finding(3, fix="safe", cell=1), root=tmp_path)
    assert not any("fixes" in result for result in run["results"])


def test_a_notebook_is_found_by_its_cell(tmp_path):
    (result,) = run_of(finding(3, cell=2, file="a.ipynb"), root=tmp_path)["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
    assert result["locations"][0]["logicalLocations"] == [{"name": "cell 2"}]
    assert result["message"] == {"text": "cell 2, line 3: a mistake"}


def test_what_github_would_not_take_is_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sarif, "MAX_RESULTS", 2)
    run = run_of(finding(1), finding(2), root=tmp_path)
    assert run["invocations"][0]["toolExecutionNotifications"] == []
    run = run_of(finding(1, "HS309"), finding(2, "HS303"), finding(3), root=tmp_path)
    assert [result["level"] for result in run["results"]] == ["error", "warning"]
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("1 more findings")
