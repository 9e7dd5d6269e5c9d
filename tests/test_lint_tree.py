"""Which files a run looks at, against git's own answer."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from halfstep.errors import HalfstepError
from halfstep.lint.tree import find_files

FOLDERS = ["a", "b", "src", "lib", "data"]
FILES = ["a.py", "b.py", "x.py", "test_a.py", "keep.py"]
PATTERNS = [
    "*.py", "a", "a/", "/a", "src/", "/src/*", "!src/", "!*/", "*", "!*.py", "a/**", "**/a", "a/**/b", "lib/*.py",
    "!keep.py", "!a/keep.py", "x.py", "/x.py", "data/", "!data/", "*_a.py", "[ab].py", "?.py", "**/", "/*", "!/src",
    "a*", "\\!x", "#c", "src/a/", "src/**/x.py", "[z-a].py", "!", "//", "*/x.py", "[!a].py", "lib/", "x/*", "keep.py ",
]  # fmt: skip


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(*paths, **options):
    return [Path(file).as_posix() for file in find_files(paths, **options).files]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty repository, and in it."""
    (tmp_path / ".git" / "info").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_stubs_and_notebooks_are_found_sorted_and_once(here):
    write(here, {"b/two.py": "", "a.pyi": "", "b/one.ipynb": "{}", "b/notes.txt": "", "c/run.sh": "", "z.py": ""})
    assert names(".") == ["a.pyi", "b/one.ipynb", "b/two.py", "z.py"]
    assert names("b", "b/two.py", here / "b", ".") == ["a.pyi", "b/one.ipynb", "b/two.py", "z.py"]
    assert names(here / "b") == [(here / "b" / name).as_posix() for name in ("one.ipynb", "two.py")]
    assert names() == []


def test_a_named_file_is_always_looked_at(here):
    write(here, {".gitignore": "*.py\n", "a.py": "", "script": "", "venv/b.py": "", "data.json": "[]"})
    assert names(".") == []
    assert names("a.py", "script", "venv/b.py", "data.json", exclude=["*"]) == [
        "a.py",
        "data.json",
        "script",
        "venv/b.py",
    ]


def test_a_path_that_does_not_exist_is_an_error(here):
    with pytest.raises(HalfstepError, match=r"path nowhere/a\.py: there is no such file or directory"):
        find_files([".", "nowhere/a.py"])


@pytest.mark.parametrize(
    "folder", [".venv", "node_modules", "__pycache__", "build", "dist", ".ipynb_checkpoints", ".tox"]
)
def test_folders_of_tools_are_left_out_unless_they_are_named(here, folder):
    write(here, {f"src/{folder}/deep/a.py": "", "src/b.py": ""})
    assert names(".") == ["src/b.py"]
    assert names(f"src/{folder}") == [f"src/{folder}/deep/a.py"]


def test_an_environment_of_any_name_is_left_out(here):
    write(here, {"torch213/pyvenv.cfg": "", "torch213/lib/a.py": "", "b.py": ""})
    assert names(".") == ["b.py"]
    assert names("torch213") == ["torch213/lib/a.py"]


@pytest.mark.parametrize("seed", range(40))
def test_what_git_ignores_is_left_out(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    folders = [tmp_path]
    for _ in range(8):
        folder = draw.choice(folders) / draw.choice(FOLDERS)
        folder.mkdir(exist_ok=True)
        folders.append(folder)
    for folder in folders:
        for name in draw.sample(FILES, 3):
            (folder / name).touch()
    for folder in draw.sample(folders, 3):
        (folder / ".gitignore").write_text("\n".join(draw.choices(PATTERNS, k=4)))
    (tmp_path / ".git" / "info" / "exclude").write_text(draw.choice(PATTERNS))
    files = sorted({str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.py")})
    monkeypatch.chdir(tmp_path)
    asked = subprocess.run(["git", "check-ignore", "--no-index", *files], capture_output=True, text=True, check=False)
    assert asked.returncode in (0, 1), asked.stderr
    assert names(".") == sorted(set(files) - set(asked.stdout.split()))
    assert files


def test_git_is_asked_from_below_too(here):
    """The directories above a named one say what is ignored in it, up to the root of its repository."""
    write(here.parent, {".gitignore": "*.py\n"})
    write(here, {".gitignore": "/src/old/\n*_pb2.py\n", ".git/info/exclude": "mine.py\n"})
    write(here, {f"src/{name}.py": "" for name in ("a", "b_pb2", "mine", "old/c")})
    assert names("src") == ["src/a.py"]
    os.chdir("src")
    assert names(".") == ["a.py"]


def test_who_names_an_ignored_folder_wants_to_see_it(here):
    write(
        here,
        {".gitignore": "out/\n*.pyi\n", "out/a.py": "", "out/b/c.py": "", "out/.gitignore": "d.py", "out/d.py": ""},
    )
    assert names(".") == []
    assert names("out") == ["out/a.py", "out/b/c.py"]
    assert names("out/b") == ["out/b/c.py"]
    write(here, {"env/.gitignore": "*\n", "env/lib/a.py": ""})  # as virtual environments have it
    assert names("env/lib") == ["env/lib/a.py"]


def test_a_repository_in_a_repository_has_its_own_rules(here):
    write(here, {".gitignore": "*_x.py\n", "inner/a_x.py": "", "inner/b.py": "", "inner/.git/info/exclude": "b.py\n"})
    assert names(".") == ["inner/a_x.py"]
    assert names("inner") == ["inner/a_x.py"]


def test_a_worktree_asks_its_repository(here):
    write(here, {"main/.git/info/exclude": "a.py\n", "main/.git/worktrees/tree/commondir": "../..\n"})
    write(here, {"tree/.git": "gitdir: ../main/.git/worktrees/tree\n", "tree/a.py": "", "tree/b.py": ""})
    assert names("tree") == ["tree/b.py"]


def test_outside_of_a_repository_only_files_beneath_count(tmp_path):
    write(tmp_path, {".gitignore": "b.py\n", "src/.gitignore": "a.py\n", "src/a.py": "", "src/b.py": ""})
    assert names(tmp_path / "src") == [(tmp_path / "src" / "b.py").as_posix()]


def test_exclude_is_a_gitignore_of_the_root(here):
    write(here, {f"{name}.py": "" for name in ("a", "tests/a", "tests/data/b", "src/tests/c", "src/d_pb2")})
    assert names(".", exclude=["/tests/data", "*_pb2.py"]) == ["a.py", "src/tests/c.py", "tests/a.py"]
    assert names(".", exclude=["tests/"]) == ["a.py", "src/d_pb2.py"]
    assert names("src", exclude=["/tests"], root="src") == ["src/d_pb2.py"]
    assert names("tests", exclude=["tests"]) == ["tests/a.py", "tests/data/b.py"]
    assert names("src", exclude=[here.name]) == ["src/d_pb2.py", "src/tests/c.py"]  # the root's own name says nothing


def test_exclude_does_not_bring_back_what_git_ignores(here):
    write(here, {".gitignore": "a.py\n", "a.py": "", "b.py": ""})
    assert names(".", exclude=["!a.py"]) == ["b.py"]


def test_json_beneath_a_folder_is_looked_at_when_it_is_a_deepspeed_configuration(here):
    write(
        here,
        {
            "zero.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
            "no_format.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
            "fp16.json": '{"fp16" : {"enabled": true}, "steps_per_print" : 10}',
            "alone.json": '{"fp16": {"enabled": true}}',
            "model.json": '{"torch_dtype": "bf16", "enabled": true}',
            "times.json": '{"fp16": {"latency": 3}}',
            "large.json": '{"fp16": {}, "train_batch_size": 8}' + " " * 2**18,
            "package.json": "{}",
        },
    )
    assert names(".") == ["fp16.json", "zero.json"]
    assert names("package.json") == ["package.json"]


def test_links_lead_to_no_loop_and_no_second_look(here):
    write(here, {"src/a.py": "", "outside.txt": "x = 1\n"})
    os.symlink("..", "src/loop")
    os.symlink("a.py", "src/same.py")
    os.symlink("../outside.txt", "src/other.py")
    os.symlink("nowhere", "src/broken.py")
    os.symlink("itself.py", "src/itself.py")
    os.symlink("src", "link")
    tree = find_files(["."])
    assert [Path(file).as_posix() for file in tree.files] == ["src/a.py", "src/other.py"]
    assert tree.skipped == tuple(
        f"{Path('src', name)} is left out: it is a link that leads nowhere" for name in ("broken.py", "itself.py")
    )
    assert names("link") == ["link/a.py", "link/other.py"]


def test_a_folder_that_cannot_be_read_is_one_line(here, monkeypatch):
    write(here, {"a.py": "", "locked/b.py": "", "open/c.py": ""})
    real = os.scandir

    def scandir(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    tree = find_files(["."])
    assert [Path(file).as_posix() for file in tree.files] == ["a.py", "open/c.py"]
    assert tree.skipped == ("locked is left out: it cannot be read (Permission denied)",)


def test_a_pipe_is_not_waited_for(here):
    os.mkfifo("pipe.py")
    assert names(".") == []
