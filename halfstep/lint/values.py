"""What an expression of a source is worth, as far as it can be known without running it.

Everything is immutable, so that a value can be kept beside an event. What is not known is :class:`Unknown`, never a
guess.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Ident = tuple[int, ...]
"""Where an object was made: the positions of the calls that led there. Two runs of one loop body make the same."""


@dataclass(frozen=True)
class Unknown:
    """Nothing is known; ``name`` is how the source calls it, for messages alone.

    devices: the device types that it was moved to, by ``x.cuda()`` or ``x.to("cuda")``. is_number: it is a number of
    Python, such as a size, which leaves the format of a tensor as it is.
    """

    name: str = ""
    devices: frozenset[str] = frozenset()
    is_number: bool = False


@dataclass(frozen=True)
class Const:
    """A number, string, bool, None."""

    value: Any


@dataclass(frozen=True)
class Name:
    """A name of a library, by the place it is documented under: ``torch.float16``."""

    qualified: str


@dataclass(frozen=True)
class Choice:
    """One of several :class:`Const` or :class:`Name`, by a condition that is not known."""

    options: frozenset[Const | Name]


@dataclass(frozen=True)
class Items:
    """A list or tuple. ``repeats``: its one item stands for any number of the same kind."""

    items: tuple[Value, ...]
    repeats: bool = False
    weight: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _weigh(self.items))


@dataclass(frozen=True)
class Table:
    """A dict with known keys; ``partial`` when it may hold more."""

    pairs: tuple[tuple[Any, Value], ...]
    partial: bool = False
    weight: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _weigh(value for _, value in self.pairs))

    def get(self, key: Any) -> Value | None:
        return next((value for known, value in self.pairs if known == key and type(known) is type(key)), None)


@dataclass(frozen=True)
class Object:
    """What calling a class of a library made, or a parameter that is used like it.

    kind: scaler, optimizer, scheduler, module, region, context, accelerator ... (``vocabulary.kind_of``), "" for
    another. type: the qualified name of its class, "" for a parameter. ``node``: the call, or the parameter. Two are
    the same when they were made in the same place.
    """

    kind: str
    type: str
    ident: Ident
    node: ast.AST = field(compare=False, repr=False)
    args: tuple[Value, ...] = field(default=(), compare=False)
    keywords: tuple[tuple[str, Value], ...] = field(default=(), compare=False)

    def argument(self, name: str, position: int | None = None) -> Value | None:
        """The argument passed by name, or at ``position``; None when it was left out."""
        for keyword, value in self.keywords:
            if keyword == name:
                return value
        return self.args[position] if position is not None and position < len(self.args) else None


@dataclass(frozen=True)
class Instance:
    """An object of a class of this source. Its attributes are in the heap of the run, under ``ident``."""

    node: ast.ClassDef = field(repr=False)
    ident: Ident
    is_module: bool = False


@dataclass(frozen=True)
class Class:
    node: ast.ClassDef = field(repr=False)


@dataclass(frozen=True)
class Function:
    """A function of this source; ``owner`` is the object it is bound to, ``frame`` where its free names are."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda = field(repr=False)
    owner: Value | None = None
    frame: int = 0


@dataclass(frozen=True)
class Method:
    """A bound method of a library's object or of a tensor: ``scaler.step``."""

    receiver: Value
    name: str


@dataclass(frozen=True)
class Parameters:
    """Parameters of modules, as ``model.parameters()`` gives them.

    of: idents of the modules; empty when it is not known whose. only: ``trainable`` or ``frozen`` where a comprehension
    chose those by ``requires_grad``, else "".
    """

    of: frozenset[Ident] = frozenset()
    only: str = ""


@dataclass(frozen=True)
class Scale:
    """The loss scale as a number, or one over it, read by ``node`` after ``updates`` calls of ``update``."""

    scaler: Ident
    updates: int
    node: ast.AST | None = field(default=None, compare=False, repr=False)
    inverse: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor, or a number read from one (tag ``number``).

    formats: the formats it may have (fp16 bf16 fp32 fp64 int bool; "16 bit" is fp16 or bf16, not known which), empty
    when nothing is known. tags: what it is:

    ``forward`` comes out of a model; ``loss`` of a loss function; ``scaled`` is multiplied by the loss scale (of
    ``scaler``, after ``updates`` updates); ``divided`` by something else than a scale; ``weighted`` by a number
    that is not known; ``gradient`` is a ``.grad`` or comes from ``autograd.grad`` (of the parameters of ``of``);
    ``parameter``; ``probability``, ``bounded`` (both within -1 and 1), ``log_probability``;
    ``lowest`` holds ``finfo.min``; ``element`` came out of a loop over a tensor; ``detached`` has no graph, ``leaf``
    begins one; ``number`` left the device; ``literal`` made from no tensor (zeros, arange, rand); ``mask`` compared;
    ``grid`` counts or spans a range that goes beyond 256 (arange, linspace, randint), as positions and time steps do,
    ``long grid`` beyond 2048; ``frozen`` is a parameter chosen for ``not requires_grad``.

    devices: the types of device that it may be on, empty when that is not known.
    """

    formats: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()
    scaler: Ident | None = None
    updates: int = 0
    of: frozenset[Ident] = frozenset()
    node: ast.AST | None = field(default=None, compare=False, repr=False)
    devices: frozenset[str] = frozenset()

    @property
    def is_16_bit(self) -> bool:
        """Whether it is known to be in fp16 or bf16."""
        return bool(self.formats) and self.formats <= {"fp16", "bf16", "16 bit"}

    @property
    def is_fp16(self) -> bool:
        """Whether it is fp16, at least on some of the devices that the source provides for."""
        return self.is_16_bit and "fp16" in self.formats

    def tagged(self, *tags: str) -> Tensor:
        return replace(self, tags=self.tags | set(tags))

    def in_formats(self, formats: frozenset[str]) -> Tensor:
        return replace(self, formats=formats)


Value = (
    Unknown
    | Const
    | Name
    | Choice
    | Items
    | Table
    | Object
    | Instance
    | Class
    | Function
    | Method
    | Parameters
    | Scale
    | Tensor
)
MAX_WEIGHT = 2000
"""Values that a list or dict may hold in all; beyond it nothing is known. ``n = (n, n)`` doubles each time it runs."""


def _weigh(values: Iterable[Value]) -> int:
    return 1 + sum(value.weight if isinstance(value, Items | Table) else 1 for value in values)


UNKNOWN = Unknown()
NONE = Const(None)
MANY = 6


def options(value: Value | None) -> frozenset[Const | Name]:
    """What a constant may be; empty when that is not known."""
    if isinstance(value, Choice):
        return value.options
    return frozenset([value]) if isinstance(value, Const | Name) else frozenset()


def is_number(value: Value | None) -> bool:
    """Whether it is a number of Python, of whatever size, that leaves the format of a tensor as it is."""
    if isinstance(value, Unknown):
        return value.is_number
    return (isinstance(value, Const) and isinstance(value.value, int | float)) or finfo_bound(value) is not None


def finfo_bound(value: Value | None) -> tuple[Object, str] | None:
    """The ``torch.finfo`` object and the name of its attribute, if ``value`` is one: ``torch.finfo(x.dtype).min``."""
    if isinstance(value, Method) and isinstance(value.receiver, Object) and value.receiver.kind == "finfo":
        return value.receiver, value.name
    return None


def is_lowest(value: Value | None) -> bool:
    """Whether it is ``torch.finfo(...).min``."""
    bound = finfo_bound(value)
    return bound is not None and bound[1] == "min"


def join(first: Value, second: Value) -> Value:
    """What is known of a value that is one of two. None and an absent context give way to the other."""
    if first == second:
        return first
    if _absent(first):
        return second
    if _absent(second):
        return first
    both = options(first), options(second)
    if both[0] and both[1] and len(both[0] | both[1]) <= MANY:
        return Choice(both[0] | both[1])
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        formats = first.formats | second.formats if first.formats and second.formats else frozenset()
        same = first.scaler == second.scaler and first.updates == second.updates
        tags = (first.tags & second.tags) if same else (first.tags & second.tags) - {"scaled"}
        devices = first.devices | second.devices if first.devices and second.devices else frozenset()
        scaler = first.scaler if same else None
        return Tensor(formats, tags, scaler, first.updates, first.of | second.of, first.node, devices)
    if isinstance(first, Object) and isinstance(second, Object) and first.kind == second.kind:
        # Two ways to make one thing: what they agree in stays known.
        mine, other = dict(first.keywords), dict(second.keywords)
        keywords = tuple((k, join(mine[k], other[k])) for k in mine if k in other)
        args = tuple(join(a, b) for a, b in zip(first.args, second.args, strict=False))
        kind_alike = first.type if first.type == second.type else ""
        return Object(first.kind, kind_alike, first.ident, first.node, args, keywords)
    if isinstance(first, Items) and isinstance(second, Items) and len(first.items) == len(second.items):
        pairs = zip(first.items, second.items, strict=True)
        return Items(tuple(join(a, b) for a, b in pairs), first.repeats or second.repeats)
    if isinstance(first, Items) and isinstance(second, Items) and not (first.items and second.items):
        filled = first if first.items else second
        return filled if filled.repeats else UNKNOWN  # a list that a loop may have filled
    if isinstance(first, Parameters) and isinstance(second, Parameters):
        return Parameters(first.of | second.of, first.only if first.only == second.only else "")
    return UNKNOWN


def _absent(value: Value) -> bool:
    return value == NONE or (isinstance(value, Object) and value.kind == "no context")
