"""HS401: names of torch.cuda.amp and its like that are deprecated."""

from halfstep.lint.migrate import deprecated_names
from halfstep.lint.rule import Rule

RULE = Rule(
    code="HS401",
    name="deprecated-amp-name",
    severity="warning",
    summary="A name such as torch.cuda.amp.autocast that torch has deprecated.",
    why="""
`torch.cuda.amp`, `torch.cpu.amp` and functions such as `torch.get_autocast_gpu_dtype` name one device. Since torch 2.4
each call of them warns, and the names under `torch.amp` take the device type instead.

Both do the same: `torch.cuda.amp.GradScaler()` is a `torch.amp.GradScaler("cuda")`. autocast alone takes its arguments
in another order now, `dtype` before `enabled`: with nothing but its name replaced, one would be taken for the other.
""",
    bad=(
        "import torch\n\nscaler = torch.cuda.amp.GradScaler(init_scale=2.0**12)  # HS401\n",
        "import torch\nfrom torch.cuda.amp import autocast\n\n\ndef predict(model, batch):\n"
        "    with autocast(dtype=torch.bfloat16):  # HS401\n"
        "        return model(batch)\n",
        "import torch\n\ntorch.set_autocast_cpu_dtype(torch.bfloat16)  # HS401\n",
        "from torch.cuda.amp import autocast  # HS401\n",
        "import torch\nfrom torch.cuda import amp\n\n\nclass Scale(torch.autograd.Function):\n    @staticmethod\n"
        "    @amp.custom_fwd  # HS401\n    def forward(ctx, x):\n        return x\n\n    @staticmethod\n"
        "    @amp.custom_bwd  # HS401\n    def backward(ctx, grad):\n        return grad\n",
    ),
    good=(
        'import torch\n\nscaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)\n',
        "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n    from torch.cuda.amp import GradScaler\n",
        "import torch\n\nif hasattr(torch.amp, 'GradScaler'):\n    scaler = torch.amp.GradScaler('cuda')\nelse:\n"
        "    scaler = torch.cuda.amp.GradScaler()\n",
        "from project.amp import autocast\n\nregion = autocast()\n",
    ),
    check=deprecated_names,
    fix="safe",
    fix_note=(
        "A call is written with the present name and its device, its arguments by name where their order has changed,"
        " and the import follows once every use of what it binds can. A name that is passed on as a value, or a base"
        " class, is left as it is."
    ),
)
