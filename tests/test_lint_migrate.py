"""Deprecated names: every way to import and to call one, what is left alone, and torch's own word for each."""

import warnings

import pytest
import torch

from halfstep.lint.check import check_source
from halfstep.lint.fix import fix_source
from halfstep.lint.migrations import MIGRATIONS
from halfstep.lint.rules.deprecated_amp_name import RULE


def lint(text, file):
    return check_source(text, file, [RULE])


def migrated(text):
    fixed = fix_source(text, "a.py", lint)
    assert not fixed.refused
    assert fix_source(fixed.text, "a.py", lint).text == fixed.text
    return fixed.text


# Before and after, without the imports of torch that each begins with.
CALLS = [
    ("torch.cuda.amp.autocast()", 'torch.amp.autocast("cuda")'),
    ("torch.cpu.amp.autocast(dtype=d)", 'torch.amp.autocast("cpu", dtype=d)'),
    ("torch.cuda.amp.autocast(use_amp)", 'torch.amp.autocast("cuda", enabled=use_amp)'),
    ("torch.cuda.amp.autocast(x, d, c)", 'torch.amp.autocast("cuda", enabled=x, dtype=d, cache_enabled=c)'),
    ("torch.cuda.amp.autocast( f(x) , cache_enabled=c)", 'torch.amp.autocast( "cuda", enabled=f(x) , cache_enabled=c)'),
    ("torch.cuda.amp.autocast(**options)", 'torch.amp.autocast("cuda", **options)'),
    (
        "torch.cuda.amp.autocast(\n    x,  # é\n    dtype=d,\n)",
        'torch.amp.autocast(\n    "cuda", enabled=x,  # é\n    dtype=d,\n)',
    ),
    ("torch.cuda.amp.autocast(  # why\n    dtype=d)", 'torch.amp.autocast(  "cuda", # why\n    dtype=d)'),
    ("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")'),
    ("torch.cuda.amp.GradScaler(2.0**8, enabled=x)", 'torch.amp.GradScaler("cuda", 2.0**8, enabled=x)'),
    ("torch.cuda.amp.GradScaler(*options)", 'torch.amp.GradScaler("cuda", *options)'),
    ("torch.cpu.amp.GradScaler()", 'torch.amp.GradScaler("cpu")'),
    ("torch.cuda.amp.grad_scaler.GradScaler()", 'torch.amp.GradScaler("cuda")'),
    ("torch.cuda.amp.autocast_mode.autocast()", 'torch.amp.autocast("cuda")'),
    ("torch.cuda.amp.custom_fwd(f)", 'torch.amp.custom_fwd(f, device_type="cuda")'),
    ("torch.cuda.amp.custom_fwd(cast_inputs=d)", 'torch.amp.custom_fwd(device_type="cuda", cast_inputs=d)'),
    ("torch.cuda.amp.custom_bwd(f)", 'torch.amp.custom_bwd(f, device_type="cuda")'),
    ("torch.get_autocast_gpu_dtype()", 'torch.get_autocast_dtype("cuda")'),
    ("torch.set_autocast_gpu_dtype(d)", 'torch.set_autocast_dtype("cuda", d)'),
    ("torch.get_autocast_cpu_dtype()", 'torch.get_autocast_dtype("cpu")'),
    ("torch.set_autocast_cpu_dtype(d)", 'torch.set_autocast_dtype("cpu", d)'),
    ("torch.is_autocast_cpu_enabled()", 'torch.is_autocast_enabled("cpu")'),
    ("torch.set_autocast_cpu_enabled(x)", 'torch.set_autocast_enabled("cpu", x)'),
]


@pytest.mark.parametrize(("old", "new"), CALLS)
def test_calls(old, new):
    assert migrated(f"import torch\n\ny = {old}\n") == f"import torch\n\ny = {new}\n"


def test_every_name_of_the_table_is_tried_above():
    text = " ".join(old for old, _ in CALLS)
    assert [old for old in MIGRATIONS if old not in text] == []


FILES = [
    (
        "from torch.cuda.amp import autocast, GradScaler as GS  # noqa: F401\n"
            "\nx = GS()\nwith autocast(False):\n    pass\n",
        "from torch.amp import autocast, GradScaler as GS  # noqa: F401\n\n"
        'x = GS("cuda")\nwith autocast("cuda", enabled=False):\n    pass\n',
    ),
    (
        "from torch.cuda import amp\n\n\n@amp.autocast()\ndef f(s: amp.GradScaler | None) -> amp.GradScaler: ...\n",
        'from torch import amp\n\n\n@amp.autocast("cuda")\ndef f(s: amp.GradScaler | None) -> amp.GradScaler: ...\n',
    ),
    ("import torch.cuda.amp as amp, os\nx = amp.GradScaler()\n", 'import torch.amp as amp, os\n'
        'x = amp.GradScaler("cuda")\n'),
    ("import torch as t\nx = t.cuda.amp.autocast()\n", 'import torch as t\nx = t.amp.autocast("cuda")\n'),
    ("import torch.cuda.amp\nx = torch.cuda.amp.autocast()\n", 'import torch.cuda.amp\n'
        'x = torch.amp.autocast("cuda")\n'),
    ("from torch import cuda\nx = cuda.amp.autocast()\n", 'from torch import cuda\nimport torch\n'
        'x = torch.amp.autocast("cuda")\n'),
    (
        "from torch.cuda.amp import (\n    GradScaler,  # one\n    autocast,  # two\n)\nx = GradScaler(), autocast()\n",
        "from torch.amp import (\n    GradScaler,  # one\n    autocast,  # two\n)\n"
        'x = GradScaler("cuda"), autocast("cuda")\n',
    ),
    (
        "from torch.cuda import amp, Stream\nx = amp.GradScaler(), Stream\n",
        'from torch.cuda import Stream\nfrom torch import amp\nx = amp.GradScaler("cuda"), Stream\n',
    ),
    ("from torch.cuda.amp.grad_scaler import GradScaler\n"
        "x = GradScaler()\n", 'from torch.amp import GradScaler\nx = GradScaler("cuda")\n'),
    (
        "from torch import get_autocast_gpu_dtype, nn\nx = get_autocast_gpu_dtype()\n",
        'from torch import nn\nfrom torch import get_autocast_dtype\nx = get_autocast_dtype("cuda")\n',
    ),
    (
        "from torch.cuda.amp import custom_fwd, custom_bwd\n\n\nclass A:\n    @custom_fwd\n"
            "    def f(): ...\n    @custom_bwd\n    def b(): ...\n",
        'from torch.amp import custom_fwd, custom_bwd\n\n\nclass A:\n'
            '    @custom_fwd(device_type="cuda")\n    def f(): ...\n'
        '    @custom_bwd(device_type="cuda")\n    def b(): ...\n',
    ),
    (
        "def f():\n    from torch.cuda.amp import autocast\n    return autocast()\n",
        'def f():\n    from torch.amp import autocast\n    return autocast("cuda")\n',
    ),
    ("from torch.cuda.amp import autocast\r\n", "from torch.amp import autocast\r\n"),
    (
        "import torch\nfrom torch.cuda.amp import GradScaler\ns = GradScaler()\n"
            "assert isinstance(s, (int, GradScaler))\n",
        'import torch\nfrom torch.amp import GradScaler\ns = GradScaler("cuda")\n'
            'assert isinstance(s, (int, GradScaler))\n',
    ),
    (
        "from torch.cuda.amp import GradScaler, autocast\nclass S(GradScaler): ...\nx = autocast()\n",
        "from torch.cuda.amp import GradScaler\nfrom torch.amp import autocast\nclass S(GradScaler): ...\n"
        'x = autocast("cuda")\n',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), FILES)
def test_imports_and_aliases(old, new):
    assert migrated(old) == new


NOT_FIXED = [
    "import torch\nregion = torch.cuda.amp.autocast\n",
    "import torch\nregion = partial(torch.cuda.amp.autocast, enabled=True)\n",
    "import torch\nx = torch.cuda.amp.autocast(*options)\n",
    "import torch\nx = torch.cuda.amp.autocast(device_type='cuda')\n",
    "import torch\nx = torch.cuda.amp.autocast((a))\n",
    "import torch\nx = torch.cuda.amp.autocast(  # why\n    a)\n",
    "import torch\nclass S(torch.cuda.amp.GradScaler): ...\n",
    "from torch.cuda.amp import autocast\n__all__ = ['autocast']\nx = autocast()\n",
    "from torch.cuda.amp import autocast\ndef f(autocast): ...\nx = autocast()\n",
    "from torch.cuda import amp\nx = amp.autocast(), amp.common\n",
    "from torch.cuda.amp import (\n    autocast,  # why\n    GradScaler,\n"
    ")\nx = autocast()\nclass S(GradScaler): ...\n",
    "from torch import get_autocast_gpu_dtype, get_autocast_dtype\n"
    "x = get_autocast_gpu_dtype(), get_autocast_dtype('cpu')\n",
]


@pytest.mark.parametrize("text", NOT_FIXED)
def test_what_is_uncertain_is_found_and_left_alone(text):
    found = lint(text, "a.py")
    assert found
    assert {finding.fix for finding in found} == {None}


SILENT = [
    'import torch\nx = torch.amp.autocast("cuda")\n',
    "import torch\nx = torch.is_autocast_enabled()\n",
    "import torch\ntorch.set_autocast_cache_enabled(False)\n",
    "try:\n    from torch.amp import autocast\nexcept ImportError:\n"
    "    from torch.cuda.amp import autocast\nx = autocast()\n",
    "import torch\ntry:\n    x = torch.amp.GradScaler()\nexcept AttributeError:\n    x = torch.cuda.amp.GradScaler()\n",
    "import torch\nif torch.__version__ < '2.4':\n    x = torch.cuda.amp.GradScaler()\n",
    "if new_version:\n    from torch.amp import autocast\nelse:\n"
    "    from torch.cuda.amp import autocast\nx = autocast\n",
    "from torch.cuda.amp import autocast\nfrom torch.amp import autocast\nx = autocast()\n",
    "def autocast(): ...\nx = autocast()\n",
    "import torch\nNAMES = [torch.cuda.amp.autocast, torch.get_autocast_gpu_dtype]\n",
    "import torch\nx = GE_2_4 if TORCH_GREATER_EQUAL_2_4 else torch.cuda.amp.GradScaler()\n",
]


@pytest.mark.parametrize("text", SILENT)
def test_silent(text):
    assert lint(text, "a.py") == []


# What torch says.


@pytest.fixture
def _autocast_settings():
    before = torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    yield
    torch.set_autocast_dtype("cuda", before[0])
    torch.set_autocast_dtype("cpu", before[1])
    torch.set_autocast_enabled("cpu", before[2])


@pytest.mark.usefixtures("_autocast_settings")
@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in CALLS if "amp.custom" not in old or "(f)" in old])
def test_torch_gives_the_same_and_warns_of_the_old_one_alone(old, new):
    values = {"torch": torch, "x": False, "d": torch.bfloat16, "c": False, "use_amp": True, "f": lambda ctx: ctx}
    values |= {"options": {"enabled": True} if "**" in old else [2.0**10]}
    results = []
    for code in (old, new):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(_attributes(eval(code, values | {"f": (lambda v: v) if code == "f(x)" else values["f"]})))
        deprecations = [w for w in caught if "deprecated" in str(w.message)]
        assert bool(deprecations) == (code == old), [str(w.message) for w in caught]
    assert results[0] == results[1]


def _attributes(value):
    if isinstance(value, torch.amp.autocast):
        return value.device, value.fast_dtype, value._enabled, value._cache_enabled
    if isinstance(value, torch.amp.GradScaler):
        return {name: str(held) for name, held in vars(value).items()}
    return "decorated" if callable(value) else value
