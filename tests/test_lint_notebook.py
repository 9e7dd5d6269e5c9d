"""A notebook as one module: lines that keep their places, magics that come back, JSON that stays as it was."""

import ast
import json

import pytest

from halfstep.lint.notebook import read_notebook


def notebook(*sources, **metadata):
    """A notebook of code cells; a source that is a dict is a cell as it stands."""
    cells = [
        source if isinstance(source, dict) else {"cell_type": "code", "outputs": [], "source": source}
        for source in sources
    ]
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def statements(text):
    """What is left to lint: the statements of the module without what stands for a magic or a border."""
    kept = [node for node in ast.parse(read_notebook(text).source).body if not isinstance(node, ast.Pass)]
    return [ast.unparse(node) for node in kept]


def test_code_cells_are_one_module_whose_lines_know_their_cell():
    markdown = {"cell_type": "markdown", "source": "# not code"}
    read = read_notebook(notebook("a = 1\nb = 2", markdown, "", ["c = 3\n", "\n", "d = 4\n"]))
    places = {line: read.place(at) for at, line in enumerate(read.source.split("\n"), 1) if "=" in line}
    assert places == {"a = 1": (1, 1), "b = 2": (1, 2), "c = 3": (3, 1), "d = 4": (3, 3)}
    assert [read.cells[cell - 1].lines[line - 1] for cell, line in places.values()] == list(places)


def test_a_line_between_cells_belongs_to_the_cell_before():
    """An error at the end of what a cell leaves open is reported there."""
    read = read_notebook(notebook("if a:\n", "b = 1"))
    with pytest.raises(SyntaxError) as caught:
        ast.parse(read.source)
    assert read.place(caught.value.lineno) == (1, 2)
    assert read.place(10**6) == (2, 1)


def test_a_cell_does_not_go_on_in_the_next_one():
    for source in ("f(", "x = 1 + \\", "x = ["):
        with pytest.raises(SyntaxError):
            ast.parse(read_notebook(notebook(source, "2)")).source)


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ("%matplotlib inline\na = 1", ["a = 1"]),
        ("!pip install -q torch \\\n  'timm\na = 1", ["a = 1"]),
        ("a = 1\n?a\na?\ntorch.amp.GradScaler??\n", ["a = 1"]),
        ("if a:\n    !ls (\nelse:\n    b = 1", ["if a:\n    pass\nelse:\n    b = 1"]),
        ("files = !ls *.py", ["files = get_ipython()"]),
        ("a, b[0] = %timeit -o f()", ["a, b[0] = get_ipython()"]),
        ("%%time\na = 1", ["a = 1"]),
        ("\n%%capture out\na = 1", ["a = 1"]),
        ("%%bash\nfor f in *; do\n echo $f; done", []),
        ("%%writefile a.py\nscaler.step(optimizer)", []),
        (";f a b\n,g a b\n/h a b\na = 1", ["a = 1"]),
    ],
)
def test_magics_are_blanked_out(source, left):
    assert statements(notebook(source)) == left
    assert statements(notebook("before = 0", source, "after = 1")) == ["before = 0", *left, "after = 1"]


@pytest.mark.parametrize(
    "source",
    [
        "a = (b\n% c)",
        'text = """\n%time x\n!ls\n"""',
        "text = '''\nit's \"\"\"\n% d\n'''",
        'print("a=%s" % b)\nprint("ok?")',
        "a = b \\\n% c",
        "a = [0  # (\n% b]",
        "f('(', \"'''\")\na = 'what?'",
        "r'\\' % a\n",
        'a = "\\""; b = (1\n% 2)',
    ],
)
def test_python_that_looks_like_a_magic_stays(source):
    read = read_notebook(notebook("%time\n" + source))
    assert read.source.split("\n", 1)[1] == source
    assert read.held == ("%time",)


@pytest.mark.parametrize(
    ("metadata", "is_read"),
    [
        ({}, True),
        ({"kernelspec": {"name": "python3", "language": "python"}}, True),
        ({"language_info": {"name": "python"}}, True),
        ({"language_info": {"name": "julia"}}, False),
        ({"kernelspec": {"name": "ir", "language": "R"}}, False),
        ({"kernelspec": {"name": "torch213"}}, True),
    ],
)
def test_a_kernel_that_is_not_python_is_skipped(metadata, is_read):
    assert (read_notebook(notebook("a <- 1", **metadata)) is not None) == is_read


def test_a_cell_of_another_language_is_skipped():
    sql = {"cell_type": "code", "source": "SELECT 1", "metadata": {"vscode": {"languageId": "sql"}}}
    assert statements(notebook("a = 1", sql, "b = 2")) == ["a = 1", "b = 2"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ('{"cells": [', "Expecting value"),
        ("[]", "no list of cells"),
        ('{"worksheets": [], "nbformat": 3}', "no list of cells"),
        ('{"cells": [3]}', "cell 1 is not an object"),
        ('{"cells": [{"cell_type": "code", "source": 3}]}', "is not text"),
        ('{"cells": [{"cell_type": "code", "source": ["a", null]}]}', "is not text"),
        ('{"cells": [{"cell_type": "code"}]}', "is not text"),
    ],
)
def test_a_broken_notebook_is_a_value_error(text, why):
    with pytest.raises(ValueError, match=why):
        read_notebook(text)


def test_odd_metadata_is_no_error():
    cell = {"cell_type": "code", "source": "a = 1", "metadata": None}
    assert statements(json.dumps({"cells": [cell], "metadata": []})) == ["a = 1"]


ODD = """{
  "nbformat":4,  "cells": [
    {"source": "# text", "cell_type": "markdown"},
    { "outputs": [{"text": ["caf\\u00e9\\n"], "source": ["not a source"]}], "cell_type": "code",
      "source": [
        "%time\\n",
        "a = \\"\\u00e9\\"\\n",
        "b = 1"
      ], "execution_count": null },
    {"cell_type": "code", "source": "c = 2\\n", "id": "x"},
    {"cell_type": "code", "source": ["d = 3"]},
    {"cell_type": "code", "source": []}
  ], "metadata": {}
}
  """


def test_what_was_not_edited_stays_to_the_byte():
    read = read_notebook(ODD)
    assert read.with_source(read.source) == ODD
    assert read.with_source(read.source.replace("b = 1", "b = 10")) == ODD.replace("b = 1", "b = 10")
    assert read.with_source(read.source.replace("c = 2", "c = 20")) == ODD.replace("c = 2", "c = 20")
    new = read.with_source(read.source.replace("b = 1", "if b:\n    b = 1").replace("d = 3", 'd = 3\ne = "4"'))
    assert new == ODD.replace('"b = 1"', '"if b:\\n",\n        "    b = 1"').replace(
        '["d = 3"]', '["d = 3\\n","e = \\"4\\""]'
    )


def test_a_notebook_without_code_is_nothing():
    text = notebook({"cell_type": "markdown", "source": "# text"})
    read = read_notebook(text)
    assert read.source == ""
    assert read.with_source("") == text


def test_an_edited_cell_keeps_its_letters_and_its_line_ends():
    text = json.dumps({"cells": [{"cell_type": "code", "source": ["s = 'é'\n", "t = 1\n"]}]}, ensure_ascii=False)
    new = read_notebook(text).with_source("s = 'é'\nt = 2\n")
    assert new == text.replace("t = 1", "t = 2")


def test_magics_come_back_where_they_were():
    source = "%load_ext a\nif a:\n    !ls \\\n      -l\n    b = 1\nx = !date\n"
    read = read_notebook(notebook(source, "%%bash\nls\n", "%%time\nc = 1"))
    edited = read.source.replace("b = 1", "b = 2\n    import os").replace("c = 1", "c = 2")
    cells = [cell["source"] for cell in json.loads(read.with_source(edited))["cells"]]
    assert cells == [source.replace("b = 1", "b = 2\n    import os"), "%%bash\nls\n", "%%time\nc = 2"]


def test_a_magic_follows_the_block_that_it_stands_in():
    read = read_notebook(notebook("!ls\na = 1"))
    edited = "if b:\n" + "\n".join("    " + line for line in read.source.split("\n"))
    assert json.loads(read.with_source(edited))["cells"][0]["source"] == "if b:\n    !ls\n    a = 1"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda s: s.replace("pass  # halfstep: cell 2\n", ""), "over the border"),
        (lambda s: s.replace("pass  # halfstep: cell 2\n", "pass  # halfstep: cell 3\n"), "over the border"),
        (lambda s: s.replace("pass  # halfstep: line 0\n", ""), "touches a magic"),
        (lambda s: s.replace("line 0\n", "line 1\n"), "touches a magic"),
        (lambda s: s.replace("cell 3\n", "cell 3\nimport torch\n"), "not Python from its first line"),
        (lambda s: s.replace("cell 2\n", "cell 2\nimport torch\n"), "not Python from its first line"),
    ],
)
def test_an_edit_that_would_break_the_notebook_is_refused(edit, why):
    read = read_notebook(notebook("!ls\na = 1", "%%time\nb = 1", "%%bash\nls"))
    with pytest.raises(ValueError, match=why):
        read.with_source(edit(read.source))


def test_an_edit_in_a_cell_of_another_language_is_refused():
    sql = {"cell_type": "code", "source": "SELECT 1", "metadata": {"vscode": {"languageId": "sql"}}}
    read = read_notebook(notebook("a = 1", sql))
    with pytest.raises(ValueError, match="not Python"):
        read.with_source(f"{read.source}\nb = 2")


def test_ten_thousand_magics_are_no_work():
    source = "!ls\n" * 10_000 + "a = 1"
    assert statements(notebook(source)) == ["a = 1"]
