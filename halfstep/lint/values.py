"""What an expression of a source is worth, as far as it can be known without running it.

Everything is immutable, so that a value can be kept beside an event. What is not known is :class:`Unknown`, never a
guess.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

Ident = tuple[int, ...]
"""Where an object was made: the positions of the calls that led there. Two runs of one loop body make the same."""


@dataclass(frozen=True)
class Unknown:
    """Nothing is known; ``name`` is how the source calls it, for messages alone."""

    name: str = ""


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


@dataclass(frozen=True)
class Table:
    """A dict with known keys; ``partial`` when it may hold more."""

    pairs: tuple[tuple[Any, Value], ...]
    partial: bool = False

    def get(self, key: Any) -> Value | None:
        return next((value for known, value in self.pairs if known == key and type(known) is type(key)), None)


@dataclass(frozen=True)
class Object:
    """What calling a class of a library made, or a parameter that is used like it.

    kind: scaler, optimizer, scheduler, module, region, context, accelerator ... (``vocabulary.kind_of``), "" for
    another. type: the qualified name of its class, "" for a parameter. ``node``: the call, or the parameter.
    """

    kind: str
    type: str
    ident: Ident
    node: ast.AST = field(compare=False, repr=False)
    args: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()

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
    """The loss scale as a number, read after ``updates`` calls of ``update`` on this path."""

    scaler: Ident
    updates: int


@dataclass(frozen=True)
class Tensor:
    """A tensor, or a number read from one (tag ``number``).

    formats: the formats it may have (fp16 bf16 fp32 fp64 int bool; "16 bit" is fp16 or bf16, not known which), empty
    when nothing is known. tags: what it is:

    ``forward`` comes out of a model; ``loss`` of a loss function; ``scaled`` is multiplied by the loss scale (of
    ``scaler``, after ``updates`` updates); ``divided`` by something else than a scale; ``gradient`` is a ``.grad`` or
    comes from ``autograd.grad`` (of the parameters of ``of``); ``parameter``; ``probability``; ``detached`` has no
    graph; ``number`` left the device; ``literal`` made from no tensor (zeros, arange, rand); ``mask`` compared;
    ``grid`` counts or spans a range (arange, linspace, randint), as positions and time steps do; ``frozen`` is a
    parameter chosen for ``not requires_grad``.
    """

    formats: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()
    scaler: Ident | None = None
    updates: int = 0
    of: frozenset[Ident] = frozenset()
    node: ast.AST | None = field(default=None, compare=False, repr=False)

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
UNKNOWN = Unknown()
NONE = Const(None)
MANY = 6


def options(value: Value | None) -> frozenset[Const | Name]:
    """What a constant may be; empty when that is not known."""
    if isinstance(value, Choice):
        return value.options
    return frozenset([value]) if isinstance(value, Const | Name) else frozenset()


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
        return Tensor(formats, tags, first.scaler if same else None, first.updates, first.of | second.of, first.node)
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
    if isinstance(first, Parameters) and isinstance(second, Parameters):
        return Parameters(first.of | second.of, first.only if first.only == second.only else "")
    return UNKNOWN


def _absent(value: Value) -> bool:
    return value == NONE or (isinstance(value, Object) and value.kind == "no context")
