"""Documentation is held by tests: its code runs, its links and maps are true, and what users set has its page."""

import dataclasses
import re
import runpy
import shlex
from collections import Counter
from pathlib import Path

import pytest
from commands import callbacks, command_of

from halfstep import events, policy
from halfstep.cli import run
from halfstep.source import load
from halfstep.workload import Workload
from halfstep.workloads import BUILT_IN

ROOT = Path(__file__).parent.parent
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = sorted([README, CHINESE, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


SLOW = ("measure.md", "plan.md")  # processes of their own; README's commands do the same


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p.name in SLOW)) for p in PAGES], ids=NAMES
)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_toml_of_a_page_is_a_policy(page, tmp_path):
    for block in blocks(page, "toml"):
        file = tmp_path / "policy.toml"
        file.write_text(block)
        assert policy.Policy.parse(str(file))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_of_a_page_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if not line.startswith("$ "):
                continue
            program, *arguments = shlex.split(line[2:], comments=True)
            assert program in {"make", "halfstep", "pip", "python", "torchrun"}, line
            if program == "torchrun" and "halfstep" in arguments:
                program, *arguments = arguments[arguments.index("halfstep") :]
            if program == "make":
                assert f"\n{arguments[0]}:" in makefile, line
            if program == "halfstep":
                flags = [word for word in arguments if word.startswith("--")]
                known = help_of(callbacks()[command_of(arguments)])
                assert all(flag in known for flag in flags), line


def help_of(callback):
    text = set()
    for name in callback.__annotations__:
        kind = name.removesuffix("_file") if name in ("json_file", "html_file") else name
        text.add("--" + kind.replace("_", "-"))
    return text


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_readme_commands_that_take_seconds_do_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shorter = {
        "compare": ["--steps", "2", "--seeds", "1"],
        "tune": ["--steps", "3"],
        "plan": ["--policies", "fp32"],
        "measure": ["--policies", "fp32", "--repeats", "1"],
        "train": ["--steps", "2", "--device", "cpu"],
    }
    ran = []
    for block in blocks(README, "console"):
        for line in block.splitlines():
            words = shlex.split(line[2:], comments=True)
            if words[0] == "python":
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            if words[0] != "halfstep":
                continue
            if command_of(words[1:]) == "watch serve":
                continue  # until Ctrl-C: tests/test_watch_server.py
            is_found = words[-1] in {"fragile", "runs/fragile-fp16"}  # which fp16 cannot train
            words += shorter.get(words[1], [])
            assert run(words[1:]) == is_found, capsys.readouterr()
            ran.append(words[1])
    explaining = ["trace", "ranges", "audit", "diff", "tune", "compare"]
    first = ["doctor", "compare", "new", "compare"]
    assert ran == ["train", "train", *first, *explaining, "watch", "plan", "measure", "lint", "lint", "lint"]
    assert (tmp_path / "mine.html").stat().st_size > 1_000_000
    assert "pool" in (tmp_path / "fragile.toml").read_text()


def sections(text):
    """The sections of a page: each begins with its heading."""
    parts, is_code = [[]], False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if re.match("#+ ", line) and not is_code:
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part) for part in parts[1:]]


def untranslated(section):
    """What a translation of a section keeps: each kind of it under its name. Order within a sentence is free."""
    code = re.findall(r"^```(\w+)\n(.*?)^```", section, re.S | re.M)
    prose = re.sub(r"^```.*?^```\n", "", section, flags=re.S | re.M)
    spans = re.findall(r"`[^`]+`", prose)
    words = re.sub(r"`[^`]+`|\]\([^)]*\)", "", prose)
    lines = prose.splitlines()
    return {
        "level": len(section) - len(section.lstrip("#")),
        "code": [(language, [sparse(line, language) for line in block.splitlines()]) for language, block in code],
        "links": Counter(re.findall(r"\]\(([^)]*)\)", prose)),
        "images": re.findall(r"!\[[^]]*\]\(([^)]*)\)", prose),
        "rows": [line.count(" |") for line in lines if line.startswith("|")],
        "spans": Counter(spans),
        "numbers": Counter(re.findall(r"(?<![a-zA-Z\d])\d[\d.,]*(?<=\d)", words)),
    }


def sparse(line, language):
    """A line of code without what is translated: comments, and what the map says about a name."""
    if language == "text":
        return re.match(r" *\S+", line).group()
    return line if language == "output" else line.partition("#")[0].rstrip()


def test_the_readme_says_the_same_in_chinese():
    """Its code, commands, links, images, tables and numbers are those of README.md, whose commands are run above.

    Who changes one changes the other.
    """
    english, chinese = README.read_text(), CHINESE.read_text()
    for text, link in ((english, "[简体中文](README.zh-CN.md)"), (chinese, "[English](README.md)")):
        assert text.splitlines()[2] == link
    ours, theirs = (
        [untranslated(section) for section in sections(text.replace("README.zh-CN.md", "README.md"))]
        for text in (english, chinese)
    )
    for of_english, of_chinese, section in zip(ours, theirs, sections(chinese), strict=True):
        for kind, value in of_english.items():
            assert of_chinese[kind] == value, (section.splitlines()[0], kind)
    # Every paragraph, table and heading is translated.
    for paragraph in re.split(r"\n{2,}", re.sub(r"^```.*?^```\n", "", chinese, flags=re.S | re.M).strip())[2:]:
        assert re.search("[\u4e00-\u9fff]", paragraph), paragraph


def test_map_of_the_readme_is_the_disk():
    (block,) = blocks(README, "text")
    folder = ROOT
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.exists(), name
        else:
            assert (folder / name).exists(), name


def test_everything_that_users_set_has_its_page():
    docs = {page.name: page.read_text() for page in PAGES}
    for command in callbacks():
        assert f"`halfstep {command}".removesuffix(" serve") in docs["index.md"]
    for field in dataclasses.fields(policy.Policy):
        word = {"modules": "module:PATTERN", "ops": "op:NAME"}.get(field.name, field.name)
        assert word in docs["policy.md"], field.name
    for field in dataclasses.fields(policy.LossScale):
        assert f"scale.{field.name}" in docs["policy.md"], field.name
    for name in (*policy.COMPUTE, *policy.PRESETS, *policy.ON_OVERFLOW, *policy.ON_EXHAUSTED):
        assert f"`{name}`" in docs["policy.md"], name
    for field in dataclasses.fields(Workload):
        assert field.name in docs["workload.md"], field.name
    for name in BUILT_IN:
        assert name in docs["workload.md"], name
    report = events.StepReport(1, lambda: (1.0, 1.0, 1.0, 0.0), lambda loss, norm: "")
    for key in report.to_dict():
        assert f"`{key}`" in docs["step.md"], key
    index = docs["index.md"]
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_defaults_in_the_policy_page_are_the_defaults():
    text = (ROOT / "docs" / "policy.md").read_text()
    plain = policy.LossScale()
    for setting, value in (
        ("scale.init", plain.init),
        ("scale.growth`, `scale.backoff", f"{plain.growth:g}, {plain.backoff:g}"),
        ("scale.interval", plain.interval),
        ("scale.floor`, `scale.ceiling", f"{plain.floor:g}, {plain.ceiling:.0f}"),
        ("scale.hysteresis", plain.hysteresis),
    ):
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        assert re.search(rf"`{re.escape(setting)}` \| {re.escape(shown)} \|", text), setting


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    expected = {"train.py": "accuracy 0.9", "tokens.py": "step 20: loss 0.0", "no_closure.py": "the same bits: True"}
    expected |= {"drop_in.py": "accuracy 1.00, 7 steps skipped", "gan.py": "distance 0."}
    expected |= {"watched.py": "pool makes it (inf) in the forward pass"}
    expected |= {"lbfgs.py": "fits: True", "lora.py": "the base is untouched: True"}
    expected |= {"ranks.py": "accuracy 0.8"}
    expected |= {"lightning_trainer.py": "the scheduler took 63 of 64 steps\nthe same bits: True"}
    expected |= {"accelerate_loop.py": "scale 32768, applied\nthe same bits: True"}
    expected |= {"sft_mixin.py": "the same losses in bf16: True\nfp16: 3 replays, 0 steps skipped"}
    assert expected[example.name] in out


def test_workloads_say_their_defaults():
    for name in BUILT_IN:
        source = load(name)
        assert source.default_steps
        assert source.default_seeds
