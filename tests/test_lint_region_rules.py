"""Rules on the autocast region: what torch really does there, where they stay silent, and what their fixes make."""

import inspect
import textwrap

import pytest
import torch

from halfstep.lint.check import check_source
from halfstep.lint.fix import fix_source
from halfstep.lint.rules import (
    argument_that_never_existed,
    autocast_query_without_device,
    bf16_support_counts_emulation,
    cast_in_region,
    device_type_guessed,
    float_undone,
    function_without_custom_fwd,
    island_on_wrong_device,
    island_without_cast,
    region_dtype,
    region_on_wrong_device,
    region_without_dtype,
)


def lines(rule, text):
    return [finding.line for finding in check_source(textwrap.dedent(text), "x.py", [rule.RULE])]


def fixed(rule, text, unsafe=False):
    return fix_source(text, "x.py", lambda text, file: check_source(text, file, [rule.RULE]), unsafe).text


# -- what the pages say about torch --


def test_a_region_of_another_device_changes_nothing_and_its_island_protects_nothing():
    a = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cuda", enabled=False):
        assert (a @ a).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert (a.float() @ a.float()).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert (a.float() @ a.float()).dtype is torch.float32


def test_a_cast_to_float_before_a_product_is_undone():
    a = torch.randn(512, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = a @ a
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = a.float() @ a.float()
    error = (lowered.double() - exact).abs().max() / exact.abs().max()
    assert 3e-3 < error < 5e-3
    assert (a.float() @ a.float() - exact).abs().max() / exact.abs().max() < 1e-6


def test_casts_by_hand_round_and_do_not_fit_a_float32_model():
    assert torch.tensor(0.1).half().item() == pytest.approx(0.09998, abs=5e-6)
    assert torch.tensor(0.1).bfloat16().item() == pytest.approx(0.1001, abs=5e-5)
    assert torch.tensor(2049.0).half().item() == 2048
    with pytest.raises(RuntimeError, match="should be the same"):
        torch.nn.Conv2d(1, 1, 3)(torch.rand(1, 1, 8, 8).half())


def test_a_question_without_device_is_about_cuda():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cpu")


def test_a_dtype_that_is_not_16_bit_turns_the_region_off_with_a_warning():
    with pytest.warns(UserWarning, match=r"target dtype is not supported. Disabling autocast"):
        region = torch.autocast("cpu", dtype=torch.float32)
    with region:
        assert not torch.is_autocast_enabled("cpu")


def test_defaults_of_dtype_and_of_emulation():
    assert torch.get_autocast_dtype("cuda") is torch.float16
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert inspect.signature(torch.cuda.is_bf16_supported).parameters["including_emulation"].default is True
    assert torch.device(torch.device("cuda", 1)).type == torch.device("cuda:1").type == "cuda"


# -- HS135, whose examples run on a CPU --


def test_bad_example_of_a_function_raises_and_its_fix_runs():
    text = function_without_custom_fwd.RULE.bad[0].replace("  # HS135", "")
    with pytest.raises(RuntimeError, match="same dtype"):
        exec(compile(text, "bad", "exec"), {})
    mended = fixed(function_without_custom_fwd, text)
    assert '    @staticmethod\n    @torch.amp.custom_fwd(device_type="cpu")\n    def forward(ctx, x, basis):' in mended
    exec(compile(mended, "mended", "exec"), {})


def test_custom_bwd_does_not_work_with_setup_context():
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2 * ctx.saved_tensors[0]

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        Square.apply(x).sum().backward()


FUNCTION = """\
import torch

class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        {backward}

def run(x, w, device):
    {use}
"""
PLAIN = "return grad @ w.T, x.T @ grad"


@pytest.mark.parametrize(
    ("backward", "use", "found"),
    [
        (PLAIN, "with torch.autocast('cpu', dtype=torch.bfloat16): return Times.apply(x, w)", [3]),
        (PLAIN, "with torch.autocast('cpu', enabled=False): return Times.apply(x, w)", []),
        (PLAIN, "with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16): return Times.apply(x, w)", []),
        (PLAIN, "return Times.apply(x, w)", []),
        ("return grad * 2, grad", "with torch.autocast('cpu', dtype=torch.bfloat16): return Times.apply(x, w)", []),
        (
            "return grad @ w.T.to(grad.dtype), x.T.to(grad.dtype) @ grad",
            "with torch.autocast('cpu', dtype=torch.bfloat16): return Times.apply(x, w)",
            [],
        ),
        (
            PLAIN,
            "with torch.autocast('cpu', dtype=torch.bfloat16): y = x.float()\n    Times.apply(y, w).sum().backward()",
            [],
        ),
    ],
)
def test_a_function_counts_only_where_its_backward_meets_autocast(backward, use, found):
    assert lines(function_without_custom_fwd, FUNCTION.format(backward=backward, use=use)) == found


@pytest.mark.parametrize("device", ["device", "'cuda' if x.is_cuda else 'cpu'"])
def test_decorators_need_a_device_that_is_known(device):
    use = f"with torch.autocast({device}, dtype=torch.bfloat16): return Times.apply(x, w)"
    text = FUNCTION.format(backward=PLAIN, use=use)
    assert lines(function_without_custom_fwd, text) == [3]
    assert fixed(function_without_custom_fwd, text, unsafe=True) == text


def test_a_use_whose_device_is_unknown_takes_the_decorators_away():
    use = "with torch.autocast('cpu', dtype=torch.bfloat16): y = Times.apply(x, w)"
    more = "    with torch.autocast(device, dtype=torch.bfloat16): return Times.apply(y, w)\n"
    text = FUNCTION.format(backward=PLAIN, use=use)
    assert fixed(function_without_custom_fwd, text) != text
    assert fixed(function_without_custom_fwd, text + more) == text + more


def test_what_is_missing_is_named_and_setup_context_gets_no_decorators():
    half = function_without_custom_fwd.RULE.good[0].replace('    @torch.amp.custom_bwd(device_type="cpu")\n', "")
    assert [finding.message[-11:] for finding in check_source(half, "x.py", [function_without_custom_fwd.RULE])] == [
        ".custom_bwd"
    ]
    separate = function_without_custom_fwd.RULE.bad[1].replace("  # HS135", "")
    found = check_source(separate, "x.py", [function_without_custom_fwd.RULE])
    assert ["setup_context" in finding.message for finding in found] == [True]
    assert fixed(function_without_custom_fwd, separate, unsafe=True) == separate


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("with torch.autocast('cpu', dtype=torch.bfloat16): y = net(x)\n    y.sum().backward()", [3]),
        ("with torch.autocast('cpu', dtype=torch.bfloat16): return net(x)", []),
        ("net(x).sum().backward()", []),
    ],
)
def test_a_function_that_is_used_elsewhere_needs_a_region_that_trains(loop, found):
    text = FUNCTION.format(backward=PLAIN, use="pass") + f"\ndef train(net, x):\n    {loop}\n"
    assert lines(function_without_custom_fwd, text) == found


# -- HS130 and HS131: devices --

MODEL = """\
import torch

def run(model: torch.nn.Module, x, use_cuda, device):
    {move}
    with torch.autocast({region}, dtype=torch.bfloat16):
        return model(x)
"""


@pytest.mark.parametrize(
    ("move", "region", "found"),
    [
        ("model.to('cpu')", "'cuda'", [5]),
        ("model.to(device='cuda:1')", "'cpu'", [5]),
        ("model.to(torch.device('mps'))", "'cuda'", [5]),
        ("model.to(0)", "'cpu'", [5]),
        ("x = x.cuda()", "'cpu'", [5]),
        ("model.to('cuda').to(torch.bfloat16)", "'cpu'", [5]),
        ("model.to('cuda' if use_cuda else 'cpu')", "'cuda'", []),
        ("model.to('cpu').to(device)", "'cuda'", []),
        ("model.to(torch.bfloat16)", "'cpu'", []),
        ("model.to('meta')", "'cuda'", []),
        ("model.to('cuda')", "device", []),
        ("if use_cuda: model.to('cuda')", "'cpu'", []),
        ("if use_cuda: model.to('cuda')\n    else: model.to('mps')", "'cpu'", [6]),
        ("if use_cuda: model.to('cuda')\n    else: model.to('mps')", "'mps'", []),
    ],
)
def test_region_and_model_have_to_be_on_devices_that_are_both_known(move, region, found):
    assert lines(region_on_wrong_device, MODEL.format(move=move, region=region)) == found


def test_regions_for_two_devices_cover_both():
    text = MODEL.format(move="model.cuda()", region="'cuda', dtype=torch.bfloat16), torch.autocast('cpu'")
    assert lines(region_on_wrong_device, text) == []
    assert lines(region_on_wrong_device, text.replace("'cuda', dtype", "'mps', dtype")) == [5]


def test_islands_for_several_devices_are_taken_together():
    text = ISLAND.format(around="'cpu', torch.bfloat16", island="'cuda', enabled=False), torch.autocast({}")
    assert lines(island_on_wrong_device, text.format("'mps'")) == [5]
    assert lines(island_on_wrong_device, text.format("'cpu'")) == []
    assert lines(island_on_wrong_device, text.format("device")) == []


def test_products_of_tensors_show_their_device_too_and_one_right_use_is_enough():
    text = """
        import torch

        def run(x):
            w = torch.randn(4, 4, device="cuda")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.matmul(w, w)
                {more}
            return y
        """
    assert lines(region_on_wrong_device, text.format(more="")) == [6]
    assert lines(region_on_wrong_device, text.format(more="x = x.cpu() @ y.cpu()")) == []


ISLAND = """\
import torch

def gram(x, device, amp):
    with torch.autocast({around}):
        with torch.autocast({island}, enabled=False):
            return x.float() @ x.float().T
"""


@pytest.mark.parametrize(
    ("around", "island", "found"),
    [
        ("'cpu', torch.bfloat16", "'cuda'", [5]),
        ("'cuda' if amp else 'cpu', torch.bfloat16", "'cuda'", [5]),
        ("'cuda' if amp else 'cpu', torch.bfloat16, amp", "'cuda'", []),
        ("'mps', torch.bfloat16, amp", "'cuda'", [5]),
        ("'cuda', torch.bfloat16, False", "'cpu'", []),
        ("device, torch.bfloat16", "'cuda'", []),
        ("'cpu', torch.bfloat16", "device", []),
        ("'cpu', torch.bfloat16", "'cpu'", []),
    ],
)
def test_island_has_to_leave_a_region_on(around, island, found):
    assert lines(island_on_wrong_device, ISLAND.format(around=around, island=island)) == found


# -- HS132, HS133, HS134: casts --

CAST = """\
import torch

def run(model: torch.nn.Module, x, y, pixels: torch.Tensor):
    {before}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        {inside}
"""


@pytest.mark.parametrize(
    ("before", "inside", "found"),
    [
        ("x = x.half()", "return model(x)", [4]),
        ("x = x.to(torch.bfloat16).cuda()", "return model(x)", [4]),
        ("x = x.to('cuda', dtype=torch.float16)", "return model(mask=None, x=x)", [4]),
        ("pass", "return model(x.bfloat16())", [6]),
        ("x = x.half()\n    x = y", "return model(x)", []),
        ("x = x.to(y.dtype)", "return model(x)", []),
        ("x = x.half()", "return x", []),
        ("model.half()", "return model(x.half())", []),
        ("model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)", "return model(x.bfloat16())", []),
        ("model = torch.nn.Linear(4, 4, bias=False)", "return model(x.bfloat16())", [6]),
        ("x = y\n    x = x.half()", "return model(x)", [5]),
        ("x = torch.arange(4096).half()", "return model(x)", []),
        ("pass", "return model.to(torch.float16)(x)", [6]),
        ("pass", "return torch.nn.functional.mse_loss(model(x).float(), y).half()", [6]),
        ("pass", "return model(x).half()", []),
    ],
)
def test_a_cast_counts_where_it_reaches_a_float32_model(before, inside, found):
    assert lines(cast_in_region, CAST.format(before=before, inside=inside)) == found


@pytest.mark.parametrize(
    ("inside", "found"),
    [
        ("h = torch.nn.Linear(4, 4)(x); return h.float() @ y", [6]),
        ("h = torch.nn.Linear(4, 4)(x); return torch.nn.functional.linear(h.float().transpose(0, 1), y)", [6]),
        ("h = torch.nn.Linear(4, 4)(x)\n        h = h.float()\n        return h @ y", [7]),
        ("h = torch.nn.Linear(4, 4)(x)\n        h = h.float()\n        s = h.sum()\n        return h @ y, s", []),
        ("h = torch.nn.Linear(4, 4)(x); return h.float().sum()", []),
        ("return torch.nn.Linear(4, 4)(pixels.float())", []),
        ("h = torch.nn.Linear(4, 4)(x); return h.half() @ y", []),
    ],
)
def test_a_float_is_undone_only_by_a_product_right_after_it(inside, found):
    assert lines(float_undone, CAST.format(before="pass", inside=inside)) == found


@pytest.mark.parametrize(
    "around",
    [
        "return pool(layer(x))",
        "with torch.autocast('cuda', dtype=torch.bfloat16): return pool(layer(x))",
    ],
)
@pytest.mark.parametrize(
    ("inside", "found"),
    [
        ("return h @ h.T", [5]),
        ("return torch.softmax(h, -1)", [5]),
        ("return h.float() @ h.float().T", []),
        ("return h.flatten(), x @ x", []),
        ("return h.to(torch.bfloat16) @ h", []),
    ],
)
def test_an_island_counts_only_where_it_computes_in_16_bit(around, inside, found):
    text = f"""
        import torch
        layer = torch.nn.Linear(4, 4)
        def pool(h):
            with torch.autocast("cuda", enabled=False):
                {inside}
        def run(x):
            {around}
        """
    assert lines(island_without_cast, text) == found


# -- HS137, HS138, HS139, HS301, HS302 --


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("if torch.is_autocast_enabled(): x = x.half()", [5]),
        ("return torch.is_autocast_enabled() and x.requires_grad", [5]),
        ("print(torch.is_autocast_enabled())", []),
        ("return x.is_cuda and torch.is_autocast_enabled()", []),
        ("if x.device.type == 'cuda':\n        if torch.is_autocast_enabled(): x = x.half()", []),
        ("return torch.is_autocast_enabled(kind) if NEW else torch.is_autocast_enabled()", []),
        ("if torch.is_autocast_enabled(): x = x * torch.is_autocast_enabled(kind)", [5]),
        ("return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()", []),
    ],
)
def test_a_query_counts_where_it_decides_for_other_devices_too(body, found):
    text = f"import torch\nNEW = hasattr(torch, 'accelerator')\ndef f(x):\n    kind = x.device.type\n    {body}\n"
    assert lines(autocast_query_without_device, text) == found
    assert lines(autocast_query_without_device, text.replace("x.device.type", "'cuda'")) == []


@pytest.mark.parametrize(
    ("guess", "right"),
    [
        ("'cuda' if device.startswith('cuda') else 'cpu'", "torch.device(device).type"),
        ("'cuda' if 'cuda' in str(device) else 'cpu'", "torch.device(device).type"),
        ("'cuda' if cfg.device.type == 'cuda' else 'cpu'", "cfg.device.type"),
        ("'cuda' if device == 'cuda' else 'cpu'", None),
    ],
)
def test_a_guessed_type_gives_way_to_the_real_one(guess, right):
    text = f"import torch\ndef f(device, cfg):\n    kind = {guess}\n    return torch.autocast(kind, dtype=torch.half)\n"
    assert lines(device_type_guessed, text) == [3]
    assert fixed(device_type_guessed, text) == (text if right is None else text.replace(guess, right))


@pytest.mark.parametrize(
    "guess",
    [
        "'cuda' if torch.cuda.is_available() else 'cpu'",
        "'cuda' if device.startswith('cuda') else device",
        "'cpu' if device == 'cpu' else 'cuda'",
        "'cuda' if device.startswith(prefix) else 'cpu'",
    ],
)
def test_another_choice_of_device_is_no_guess(guess):
    assert lines(device_type_guessed, f"import torch\nkind = {guess}\ntorch.autocast(kind, dtype=torch.half)\n") == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("device = 'cuda:0' if torch.cuda.is_available() else 'cpu'", []),
        ("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')", []),
        ("device = 'cuda' if torch.cuda.is_available() else 'mps'", [3]),
        ("device = torch.load('cuda' if torch.cuda.is_available() else 'cpu')", [3]),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'; device = sys.argv[1]", [3]),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'; move = lambda device: device", [3]),
    ],
)
def test_a_device_that_can_be_nothing_else_is_not_guessed(given, found):
    guess = "kind = 'cuda' if 'cuda' in str(device) else 'cpu'"
    text = f"import torch, sys\n{given}\n{guess}\ntorch.autocast(kind, dtype=torch.half)\n"
    assert lines(device_type_guessed, text) == found


def test_a_guess_in_a_source_without_autocast_is_not_ours():
    assert lines(device_type_guessed, "import torch\nkind = 'cuda' if 'cuda' in dev else 'cpu'\nx = dev.half()\n") == []


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ("torch.autocast('cuda', dtype=torch.float64)", "on CUDA every product in it runs in fp64;"),
        ("torch.autocast('cpu', torch.float32)", "on cpu torch turns it off with a warning;"),
        ("torch.autocast(device, dtype=torch.float)", "elsewhere torch turns it off"),
        ("torch.autocast('cuda', dtype=torch.float32, enabled=False)", None),
        ("torch.autocast('cuda', dtype=torch.float32 if full else torch.bfloat16)", None),
        ("torch.autocast('cuda', dtype=dtype)", None),
    ],
)
def test_dtype_of_a_region(region, words):
    found = check_source(f"import torch\ndef f(device, full, dtype): return {region}\n", "x.py", [region_dtype.RULE])
    assert [words in finding.message for finding in found] == ([] if words is None else [True])


def test_emulation_is_asked_away_and_nothing_else_changes():
    text = "import torch as t\nbf16 = t.cuda.is_bf16_supported()  # a V100 says yes\n"
    asked = text.replace("()", "(including_emulation=False)")
    assert fixed(bf16_support_counts_emulation, text, unsafe=True) == asked
    assert lines(bf16_support_counts_emulation, asked.replace("False", "True")) == []


@pytest.mark.parametrize(
    ("region", "right"),
    [
        ("torch.autocast('cuda')", "torch.autocast('cuda', dtype=torch.float16)"),
        (
            "torch.autocast(\n    device_type='cpu',  # slow\n)",
            "torch.autocast(\n    device_type='cpu', dtype=torch.bfloat16,  # slow\n)",
        ),
        ("torch.autocast('cuda', enabled=on)", "torch.autocast('cuda', enabled=on, dtype=torch.float16)"),
        ("torch.autocast(device)", "torch.autocast(device)"),
    ],
)
def test_default_of_a_region_is_written_out_where_it_is_known(region, right):
    text = f"import torch\ndevice, on = 'cuda', True\nregion = {region}\n"
    assert lines(region_without_dtype, text) == [3]
    assert fixed(region_without_dtype, text) == text, "unsafe"
    assert fixed(region_without_dtype, text, unsafe=True) == text.replace(region, right)


def test_default_cannot_be_written_without_the_name_of_torch():
    text = "from torch import autocast\nregion = autocast('cuda')\n"
    assert lines(region_without_dtype, text) == [2]
    assert fixed(region_without_dtype, text, unsafe=True) == text


@pytest.mark.parametrize(
    "region",
    [
        "autocast('cuda', None)",
        "autocast('cuda', **settings)",
        "autocast('cuda', enabled=False)",
        "set_autocast_dtype(a, b), torch.autocast('cuda')",
    ],
)
def test_a_format_that_may_be_set_elsewhere_is_not_missed(region):
    assert lines(region_without_dtype, f"import torch\nregion = torch.{region}\n") == []


def test_unscale_gets_its_underscore():
    text = argument_that_never_existed.RULE.bad[1].replace("  # HS136", "")
    assert fixed(argument_that_never_existed, text) == text.replace(".unscale(", ".unscale_(")
