"""A file after its rewrites: Python, notebooks, what is left alone, and what is refused."""

import json

from halfstep.lint.mend import Mended, Rewritten, mend


def shout(source, file):
    return Rewritten(source.replace("bad", "GOOD"), source.count("bad"), [(None, f"{source.count('no')} no")])


def notebook(*cells, language="python"):
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in cells]
    return json.dumps({"cells": cells, "metadata": {"language_info": {"name": language}}, "nbformat": 4})


def test_rewrites_follow_each_other():
    mended = mend("bad no bad\n", "a.py", [shout, lambda source, file: Rewritten(source.lower(), 1)])
    assert mended == Mended("a.py", "bad no bad\n", "good no good\n", 3, ["a.py: 1 no"])
    assert mended.changed
    assert not mend("x\n", "a.py", [shout]).changed


def test_a_notebook_is_rewritten_in_its_cells():
    mended = mend(notebook("%time bad", "bad = 1\nno"), "a.ipynb", [shout])
    assert mended.after == notebook("%time bad", "GOOD = 1\nno")
    assert (mended.num_fixed, mended.notes) == (1, ["a.ipynb: 1 no"])


def test_other_json_and_other_languages_stay_as_they_are():
    for file, text in (("a.json", '{"bad": 1}'), ("a.ipynb", notebook("bad", language="R"))):
        assert mend(text, file, [shout]) == Mended(file, text, text)


def test_a_rewrite_over_the_border_of_a_cell_is_refused_whole():
    text = notebook("bad", "bad")
    mended = mend(text, "a.ipynb", [lambda source, file: Rewritten("bad", 2)])
    assert (mended.after, mended.changed, mended.num_fixed) == (text, False, 0)
    (note,) = mended.notes
    assert note.startswith("a.ipynb: nothing was changed, the edit reaches over the border")


def test_a_note_names_its_line_or_its_cell():
    def rewrite(source, file):
        lines = source.replace("bad", "good\nmore").split("\n")
        return Rewritten("\n".join(lines), 0, [(at, text) for at, text in enumerate(lines, 1) if "no" in text])

    assert mend("bad\nno\n", "a.py", [rewrite]).notes == ["a.py:3: no"]
    notes = mend(notebook("no 1\nbad", "", "bad\n!ls\nno 2", "no 3"), "a.ipynb", [rewrite]).notes
    assert notes == ["a.ipynb:cell 1:1: no 1", "a.ipynb:cell 3:4: no 2", "a.ipynb:cell 4:1: no 3"]


def test_the_difference_of_nothing_is_nothing():
    assert Mended("a.py", "x\n", "x\n").difference() == ""
    assert Mended("a.py", "x", "y\n").difference() == (
        "--- a.py\n+++ a.py\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y\n"
    )
