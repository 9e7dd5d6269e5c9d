"""Which rules are looked for in which file: pyproject.toml, flags, prefixes and names."""

import pytest

from halfstep.errors import HalfstepError
from halfstep.lint import catalogue
from halfstep.lint.rule import Rule
from halfstep.lint.settings import Settings, check_selectors, find_settings

NAMES = {"HS101": "clip-before-unscale", "HS102": "scaled-gradients-read", "HS201": "scaler-with-bf16"}


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    rules = tuple(Rule(code, name, "error", "", "", ("",), ("",), lambda _: iter(())) for code, name in NAMES.items())
    monkeypatch.setattr(catalogue, "all_rules", lambda: rules)
    catalogue.catalogue.cache_clear()
    yield
    catalogue.catalogue.cache_clear()


@pytest.fixture
def project(tmp_path):
    """Write pyproject.toml with a table of ours, and read what holds for the folder."""

    def write(table, folder="."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "pyproject.toml").write_text(table)
        return find_settings(tmp_path)

    return write


@pytest.mark.parametrize(
    ("select", "ignore", "codes"),
    [
        (None, (), "HS000 HS001 HS002 HS101 HS102 HS201"),
        (("HS1",), (), "HS000 HS002 HS101 HS102"),
        (("HS",), ("HS1",), "HS000 HS001 HS002 HS201"),
        (None, ("HS1",), "HS000 HS001 HS002 HS201"),
        (None, ("HS",), ""),
        (("HS101", "HS2"), ("HS0",), "HS101 HS201"),
        (("HS101",), ("HS1",), "HS000 HS002 HS101"),
        (("HS1",), ("HS101", "HS002"), "HS000 HS102"),
        (("HS101",), ("HS101", "HS0"), ""),
        (("clip-before-unscale",), ("HS1", "HS0"), "HS101"),
        (None, ("scaler-with-bf16", "HS0"), "HS101 HS102"),
        ((), (), "HS000 HS002"),
    ],
)
def test_the_longer_selector_wins_and_ignore_wins_a_tie(tmp_path, select, ignore, codes):
    assert Settings(tmp_path, select, ignore).codes == set(codes.split())


def test_flags_stand_in_the_place_of_settings(tmp_path):
    settings = Settings(tmp_path, ("HS1",), ("HS101",), ("old/",))
    assert settings.override(select=None, ignore=None, exclude=None) == settings
    assert settings.override(select=["HS2"], ignore=None).codes == {"HS000", "HS002", "HS201"}
    assert settings.override(ignore=["HS0"]).codes == {"HS101", "HS102"}
    assert settings.override(exclude=["new"]).exclude == ("new",)


def test_files_can_ignore_more(project, tmp_path):
    settings = project(
        '[tool.halfstep.lint]\nper-file-ignores = {"examples/*" = ["HS2"], "test_*.py" = ["clip-before-unscale"]}\n'
    )
    for name, missing in {
        "train.py": set(),
        "examples/a.py": {"HS201"},
        "examples/deep/a.py": {"HS201"},
        "examples/test_a.py": {"HS201", "HS101"},
        "deep/test_a.py": {"HS101"},
        "deep/examples/a.py": set(),
        "../test_a.py": set(),
    }.items():
        assert settings.codes - settings.codes_for(tmp_path / name) == missing, name


def test_the_nearest_table_counts(project, tmp_path):
    project("[tool.halfstep.lint]\nselect = ['HS2']\nexclude = ['data/']\n")
    project("[project]\nname = 'inner'\n", "inner")
    project("[tool.halfstep.lint]\n", "own")
    (tmp_path / "inner" / "a.py").touch()
    for path in (tmp_path, tmp_path / "a.py", tmp_path / "inner", tmp_path / "inner" / "a.py"):
        settings = find_settings(path)
        assert (settings.root, settings.select, settings.exclude) == (tmp_path.resolve(), ("HS2",), ("data/",))
    assert find_settings(tmp_path / "own").select is None
    assert find_settings(tmp_path / "own").root == (tmp_path / "own").resolve()


def test_without_a_table_all_is_looked_for(tmp_path):
    (tmp_path / "a.py").touch()
    (tmp_path / "pyproject.toml").write_text("tool = 3\n")
    for path in (tmp_path, tmp_path / "a.py"):
        assert find_settings(path) == Settings(tmp_path.resolve())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tool.halfstep.lint]\nslect = []\n",
            "slect: there is no such setting. Use select, ignore, exclude, per-file",
        ),
        ("[tool.halfstep.lint]\nselect = 'HS1'\n", "select: it is 'HS1'. Write a list of strings"),
        ("[tool.halfstep.lint]\nexclude = [1]\n", "exclude: it is [1]. Write a list of strings"),
        ("[tool.halfstep.lint]\nselect = ['HS9']\n", "select HS9: no rule has this code"),
        ("[tool.halfstep.lint]\nignore = ['clip-before-unscaled']\n", "Did you mean clip-before-unscale?"),
        ("[tool.halfstep.lint]\nselect = ['']\n", "select '': no rule has this code"),
        ("[tool.halfstep.lint]\nper-file-ignores = ['HS1']\n", "per-file-ignores: it is ['HS1']"),
        ("[tool.halfstep.lint]\nper-file-ignores = {'a*' = 'HS1'}\n", "per-file-ignores a*: it is 'HS1'"),
        ("[tool.halfstep.lint]\nper-file-ignores = {'a*' = ['X']}\n", "per-file-ignores a* X: no rule"),
        ("[tool.halfstep]\nlint = 3\n", "[tool.halfstep.lint]: it is no table"),
        ("[tool.halfstep.lnt]\n", "[tool.halfstep] lnt: there is no such setting. Use [tool.halfstep.lint]"),
        ("[tool.halfstep\n", "it is not TOML"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(project, text, message):
    with pytest.raises(HalfstepError) as error:
        project(text)
    assert message in str(error.value)
    assert "pyproject.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_selector_of_a_flag_is_named_with_the_flag():
    check_selectors(["HS1", "HS101", "scaler-with-bf16"], "--select")
    with pytest.raises(HalfstepError, match=r"^--select HS11: no rule.*Did you mean HS101\?"):
        check_selectors(["HS2", "HS11"], "--select")
