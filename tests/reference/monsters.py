"""Sources that try to break or stall a linter: too deep, too wide, too many ways through, turned in on themselves."""

HEAD = "import torch\nscaler = torch.amp.GradScaler('cuda')\nopt = torch.optim.AdamW(net.parameters())\n"
STEP = "scaler.scale(loss).backward()\n{0}scaler.unscale_(opt)\n{0}scaler.step(opt)\n{0}scaler.update()"


def step(depth: int) -> str:
    return STEP.format("    " * depth)


def many(form: str, count: int) -> str:
    """``form`` ``count`` times, ``{0}`` being the number and ``{1}`` the next one."""
    return "".join(form.format(number, number + 1) for number in range(count))


def nested(opening: str, depth: int) -> str:
    lines = ["    " * level + opening.format(level) + "\n" for level in range(depth)]
    return HEAD + "".join(lines) + "    " * depth + step(depth) + "\n"


def nested_tries(depth: int) -> str:
    opened = "".join("    " * level + "try:\n" for level in range(depth))
    closed = [f"{'    ' * level}finally:\n{'    ' * level}    scaler.update()\n" for level in range(depth - 1, -1, -1)]
    return HEAD + opened + "    " * depth + "scaler.step(opt)\n" + "".join(closed)


def many_ifs(count: int) -> str:
    body = "".join(f"        if c{n}:\n            {step(3)}\n" for n in range(count))
    return f"{HEAD}def train(loader):\n    for loss in loader:\n{body}"


def many_continues(count: int) -> str:
    form = "    scaler.scale(loss).backward()\n    if c{0}:\n        continue\n    scaler.step(opt)\n"
    return f"{HEAD}for loss in loader:\n{many(form, count)}"


def many_tries(count: int) -> str:
    return HEAD + many("try:\n    scaler.step(opt)\nexcept E{0}:\n    pass\nelse:\n    scaler.update()\n", count)


def many_returns(count: int) -> str:
    body = many("    if c{0}: return scaler.step(opt)\n", count)
    return f"{HEAD}def f():\n{body}f()\n"


def calls_twice(depth: int) -> str:
    """Each function calls the next one twice: 2 ** depth calls, if every one were followed."""
    functions = many("def f{0}(loss):\n    f{1}(loss)\n    f{1}(loss)\n", depth)
    return f"{HEAD}{functions}def f{depth}(loss):\n    {step(1)}\nf0(loss)\n"


def doubled(name: str, count: int) -> str:
    first, again = DOUBLING[name]
    return f"{HEAD}{first}\n{f'{again}{chr(10)}' * count}torch.save({{'n': n}}, 'x')\nscaler.step(n)\n"


def loops_in_loops(depth: int) -> str:
    return nested("for i{0} in loader:", min(depth, 19))


GROWING = {
    "ifs": many_ifs,
    "continues": many_continues,
    "tries": many_tries,
    "returns": many_returns,
    "calls-twice": calls_twice,
    "loops-in-loops": loops_in_loops,
}
"""Sources whose ways through, but not whose size, grow like 2 ** count."""

DOUBLING = {
    "numbers": ("n = 100_000", "n = n * n"),
    "text": ("n = 'cuda'", "n = n + n"),
    "lists": ("n = [opt]", "n = n + n"),
    "dicts": ("n = {}", "n = {'a': n, 'b': n}"),
    "pairs": ("n = opt", "n = (n, n)"),
    "choices": ("n = opt", "n = n if c else [n]"),
}
"""A first statement, and one that doubles what the first one made."""

DEEP = {
    "parentheses": HEAD + "x = " + "(" * 500 + ")" * 500,
    "brackets": HEAD + "x = " + "[" * 150 + "]" * 150,
    "minus": HEAD + "x = " + "-" * 3000 + "1",
    "attributes": HEAD + "x = scaler" + ".step" * 2000,
    "calls": HEAD + "x = scaler" + ".step(opt)" * 1000,
    "call-in-call": HEAD + "f(" * 150 + "scaler" + ")" * 150,
    "sum": HEAD + "x = " + " + ".join(["loss.item()"] * 3000),
    "conditional": HEAD + "x = " + "a if scaler else " * 800 + "b",
    "lambda": HEAD + "x = " + "lambda: " * 500 + "scaler.step(opt)",
    "ifs": nested("if c{0}:", 90),
    "loops": nested("for i{0} in loader:", 18),
    "whiles": nested("while c{0}:", 18),
    "withs": nested("with torch.autocast('cuda', dtype=torch.float16):", 18),
    "tries": nested_tries(18),
    "functions": nested("def f{0}():", 90),
    "classes": nested("class C{0}:", 90),
    "elif": HEAD + "if a:\n    scaler.step(opt)\n" + many("elif c{0}:\n    scaler.update()\n", 2000),
}

WIDE = {
    "boolean": HEAD + "x = " + " or ".join(["scaler.step(opt)"] * 1000),
    "comprehension": HEAD + "x = [scaler.step(o) " + many("for o in opts{0} ", 300) + "]",
    "string": HEAD + "x = '" + "scaler.step " * 50_000 + "'",
    "dict": HEAD + "torch.save({" + many("'k{0}': opt.state_dict(), ", 1000) + "}, 'x')",
    "arguments": HEAD + "scaler.step(" + many("a{0}=opt, ", 1000) + ")",
    "targets": HEAD + many("x{0} = ", 2000) + "scaler\n",
    "ifs": HEAD + "def train():\n" + many("    if c{0}:\n        scaler.step(opt)\n", 300) + "train()\n",
    "if-else": HEAD + many("if c{0}:\n    scaler.step(opt)\nelse:\n    scaler.update()\n", 300),
    "steps": many_ifs(60),
    "cases": HEAD
    + "match x:\n"
    + many("    case {0}:\n        scaler.step(opt)\n", 300)
    + "    case [*_, {'a': scaler}] | scaler: scaler.update()\n",
    "loops": HEAD + f"for loss in loader:\n    {step(1)}\n" * 200,
    "functions": HEAD + "".join(f"def f{n}(loss):\n    {step(1)}\n" for n in range(200)),
    "methods": HEAD
    + "class T:\n"
    + "".join(f"    def m{n}(self, loss):\n        self.m{n + 1}(loss)\n        {step(2)}\n" for n in range(150)),
    "assignments": HEAD + many("s{1} = s{0}\n", 1000) + "s1000.step(opt)\n",
    "switched-values": HEAD + many("x = scaler.step if x == {0} else x\n", 300),
    "calls-twice": calls_twice(40),
    "ring-of-calls": HEAD + many("def f{0}():\n    scaler.step(opt)\n    return f{1}()\n", 150) + "f150 = f0\nf0()\n",
}

TURNED_IN = {
    "calls-itself": HEAD + f"def f(loss):\n    {step(1)}\n    f(loss)\n    return f(f)\nf(f(f))\n",
    "calls-each-other": f"""{HEAD}
def f(n):
    scaler.step(opt)
    return g(n)
def g(n):
    scaler.update()
    return f(n)
f(g)
""",
    "methods-each-other": f"""{HEAD}
class T:
    def a(self):
        scaler.step(opt)
        return self.b().a()
    def b(self):
        self.scaler = self.a()
        return self
T().a().b()
""",
    "class-of-itself": f"""{HEAD}
class T(T):
    def __init__(self):
        super().__init__()
        self.s = T()
T().s.s.step(opt)
""",
    "classes-of-each-other": f"""{HEAD}
class A(B):
    def step(self):
        return super().step() or self.s.step(opt)
class B(A):
    def step(self):
        self.s = B()
        return super().step()
A().step()
""",
    "assigned-to-itself": f"""{HEAD}
x = x
a = b
b = a
scaler = scaler
scaler.x = scaler
scaler = scaler.x.x
a, (b, a) = b, (a, b)
torch = torch.torch
self.scaler = self.scaler = self
x = [x]
x = {{x: x}}
x = (x := x)
x.step(opt)
b.step(a)
""",
    "wrapped-in-itself": HEAD
    + "for n in r:\n    net = wrap(net)\n    scaler = wrap(scaler, scaler)\n    scaler.step(scaler)\n" * 30,
    "decorators": HEAD + "@f\n" * 300 + "def f(f=f, *f1, **f2) -> f:\n    scaler.step(opt)\n    return f\nf()()()\n",
    "lambda-of-itself": HEAD + "f = lambda *a: f(f, *a)\nf(scaler.step(opt))\n",
    "generators": f"""{HEAD}
def g():
    yield from g()
    scaler.step((yield))
    yield scaler.update()
for _ in g():
    next(g())
""",
    "names-taken-away": f"""{HEAD}
def f():
    global scaler, net
    scaler = None
    def g():
        global opt
        del opt
        scaler.step(opt)
    g()
f()
del scaler
scaler.update()
""",
}

STRANGE = {
    "empty": "",
    "white": " \n\t\n\x0c\n",
    "comments": "# autocast\n# GradScaler\n" * 500,
    "byte-order-mark": "\ufeffimport torch\nwith torch.autocast('cuda'):\n    pass\n",
    "no-last-newline": HEAD + "scaler.step(opt)",
    "windows-lines": HEAD.replace("\n", "\r\n") + "for x in y:\r\n    scaler.step(opt)\r\n",
    "old-mac-lines": HEAD.replace("\n", "\r") + "for x in y:\r    scaler.step(opt)\r",
    "null": HEAD + "x = '\0'",
    "lone-surrogate": HEAD + "x = '\ud800'\nscaler.step(opt)\n",
    "form-feeds": HEAD + "\x0c\n'\xe9\x0c\x1c\u2028'; loss.backward(); scaler.step(opt)\n" * 20,
    "imports": """
from torch import *
from torch.amp import *
from . import scaler
from .. import torch as t
import torch.cuda.amp
import torch as torch
import a.b.c as GradScaler
from x import autocast as autocast, y as torch
GradScaler().step(autocast())
""",
    "arguments": f"""{HEAD}
scaler.scale().backward()
scaler.unscale_()
scaler.step()
scaler.update(1, 2)
torch.autocast()
opt.step(*a, **k)
torch.amp.GradScaler(*a, **k)
torch.optim.Adam()
torch.save()
x.masked_fill()
torch.log()
x.clamp()
x.to()
with torch.autocast(*a, **k), torch.autocast(dtype=dtype), torch.autocast(device_type=1, dtype='x', enabled=...):
    pass
torch.nn.utils.clip_grad_norm_()
x.sum(*a)
x.pow()
torch.where()
torch.full()
torch.finfo()
torch.nn.functional.normalize()
""",
    "starred": f"""{HEAD}
*a, b = *scaler, opt
for a, *b in c:
    scaler.step(*b)
with x as (a, [b, *c]):
    b.step(a)
x[*a] = scaler
""",
    "constants": f"""{HEAD}
x = y.masked_fill(m, -1e400)
z = x + 1e-400
w = x.clamp(1 - 1e-4j, 10**9)
v = x * ... + b'' + 1j
u = x.clamp(min=float('nan'), max=-float('inf'))
t = 10 ** 10 ** 10 ** 10
s = x + (1 << 10 ** 9)
r = 1 / 0
q = 1 % 0.0
p = 'a' * 10 ** 12
o = '%1000000000000d' % 1
m = (1,) * 10 ** 12
""",
    "long-numbers": HEAD + "x = y.masked_fill(m, -" + "9" * 4000 + ")\nz = y + 0x" + "f" * 6000 + "\n",
    "conditions": f"""{HEAD}
for loss in loader:
    if (i + 1) % 0 == 0 or 1 % i or not i % n % n:
        scaler.step(opt)
    elif ...:
        scaler.update()
""",
}

MONSTERS = {
    f"{kind}-{name}": text
    for kind, sources in (("deep", DEEP), ("wide", WIDE), ("turned-in", TURNED_IN), ("strange", STRANGE))
    for name, text in sources.items()
}

OTHER_VERSIONS = (
    "type Scaler = GradScaler | None\nscaler: Scaler = None\n",
    "def train[T: (int, str), *A, **P](scaler: T) -> T:\n    scaler.step(scaler)\n",
    "class Trainer[T]:\n    def fit(self, x: T): self.scaler.step(x)\n",
    "class Trainer[T = int]:\n    scaler: T\n",
    'print(f"{scaler["scale"]} {f\'{f"{loss}"}\'}")\nscaler.step(opt)\n',
    "try:\n    scaler.step(opt)\nexcept* ValueError:\n    scaler.update()\n",
    "try:\n    scaler.step(opt)\nexcept ValueError, TypeError:\n    scaler.update()\n",
    "x = t'{scaler}'\nscaler.step(opt)\n",
    "print scaler.step(opt)\n",
    "async def f():\n    async with a as b, c: await scaler.step(opt)\n    async for x in y: scaler.update()\n",
)
"""Syntax that some versions of Python know and others do not."""
