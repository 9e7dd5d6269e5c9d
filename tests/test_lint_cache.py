"""What was found before is used again, and only where it still holds."""

import json
import os
import time

import pytest

from halfstep.lint import cache as module
from halfstep.lint.cache import NUM_DAYS_KEPT, Cache
from halfstep.lint.finding import Edit, Finding, Span

FINDING = Finding(
    "a.py", 1, 2, 3, 4, "HS101", "clip", "é, line\nbreak", "error", "safe", 5, (Edit("replace", Span(1, 2, 3, 4), "x"),)
)
KEY = Cache.key(b"import torch", "a.py", ["HS101", "HS102"])


@pytest.fixture
def saved(tmp_path):
    """A directory that holds FINDING under KEY."""
    cache = Cache(tmp_path / "cache")
    cache.add(KEY, [FINDING])
    cache.add("clean", [])
    cache.save()
    return tmp_path / "cache"


def test_findings_come_back_as_they_were(saved):
    cache = Cache(saved)
    assert cache.find(KEY) == [FINDING]
    assert cache.find("clean") == []
    assert cache.find("unknown") is None


def test_a_key_tells_contents_names_and_rules_apart():
    keys = {
        Cache.key(content, file, codes)
        for content in (b"", b"a", b"b")
        for file in ("a.py", "a.pyi", "b/a.py")
        for codes in ((), ("HS101",), ("HS101", "HS102"))
    }
    assert len(keys) == 27
    assert Cache.key(b"", "a.py", ("HS102", "HS101")) == Cache.key(b"", "a.py", {"HS101", "HS102"})
    assert Cache.key(b"ab", "c", ()) != Cache.key(b"b", "ca", ())
    assert Cache.key(b"", os.fsdecode(b"\xff.py"), ())


def test_git_does_not_see_it(saved):
    assert (saved / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-10],
        lambda content: content.replace(b"HS101", b"HS999"),
        lambda content: content.replace(b"\n", b"", 1),
        lambda content: b"\xff" + content,
        lambda content: b"0\n[]",
    ],
)
def test_a_damaged_cache_is_empty_and_made_anew(saved, damage):
    (file,) = saved.glob("*.json")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    cache = Cache(saved)
    assert cache.find(KEY) is None
    cache.add(KEY, [FINDING])
    cache.save()
    assert Cache(saved).find(KEY) == [FINDING]


def test_another_version_of_the_linter_starts_empty(saved, monkeypatch):
    monkeypatch.setattr(module, "__version__", "999")
    module._engine.cache_clear()
    try:
        assert Cache(saved).find(KEY) is None
    finally:
        module._engine.cache_clear()


def test_a_changed_rule_starts_empty(saved, tmp_path, monkeypatch):
    sources = tmp_path / "lint"
    sources.mkdir()
    (sources / "rule.py").write_text("1")
    monkeypatch.setattr(module, "__file__", str(sources / "cache.py"))
    engines = []
    try:
        for name, text in (("rule.py", "1"), ("rule.py", "2"), ("other.py", "")):
            (sources / name).write_text(text)
            module._engine.cache_clear()
            engines.append(Cache(saved).file)
    finally:
        module._engine.cache_clear()
    assert len(set(engines)) == 3


def test_what_nobody_asked_for_goes(saved, monkeypatch):
    (saved / "lint-0.json").write_text("of another version")
    (saved / "lint-1.json").write_text("of another version")
    now = time.time()
    os.utime(saved / "lint-0.json", (0, now - (NUM_DAYS_KEPT + 1) * 86400))
    later = now + (NUM_DAYS_KEPT - 5) * 86400
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        cache = Cache(saved)
        assert cache.find(KEY) == [FINDING]
        os.utime(saved / "lint-1.json", (0, later))
        cache.save()
        assert not (saved / "lint-0.json").exists()
        assert (saved / "lint-1.json").exists()
        patch.setattr(time, "time", lambda: later + 10 * 86400)
        cache = Cache(saved)
        cache.add("new", [])
        cache.save()
        entries = json.loads(cache.file.read_text().partition("\n")[2])
    assert set(entries) == {KEY, "new"}


def test_nothing_is_written_when_nothing_is_new(saved):
    (file,) = saved.glob("*.json")
    os.utime(file, (0, 0))
    cache = Cache(saved)
    cache.find(KEY)
    cache.save()
    assert file.stat().st_mtime == 0


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    cache.add(KEY, [FINDING])
    cache.save()
    assert cache.find(KEY) == [FINDING]
    assert (tmp_path / "file").read_text() == ""
