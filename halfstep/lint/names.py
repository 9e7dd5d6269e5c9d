"""Which library object a name of a source means, through imports and aliases.

``GS`` after ``from torch.cuda.amp import GradScaler as GS`` is ``torch.cuda.amp.GradScaler``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _Scope:
    """The names bound in a module, class or function, each with the expression or import it stands for."""

    def __init__(self, parent: _Scope | None, is_class: bool = False) -> None:
        self.parent, self.is_class = parent, is_class
        self.bindings: dict[str, str | ast.expr | None] = {}

    def bind(self, name: str, meaning: str | ast.expr | None) -> None:
        known = self.bindings.get(name)
        if name not in self.bindings:
            self.bindings[name] = meaning
        elif not isinstance(known, str):
            # An import outlives what `except ImportError` puts in its place; two assignments are no alias.
            self.bindings[name] = meaning if isinstance(meaning, str) else None

    def find(self, name: str) -> tuple[_Scope, str | ast.expr | None] | None:
        scope: _Scope | None = self
        first = True
        while scope is not None:
            if name in scope.bindings and (first or not scope.is_class):
                return scope, scope.bindings[name]
            scope, first = scope.parent, False
        return None


class Names:
    """The library names of one module. ``tree``: the parsed module."""

    def __init__(self, tree: ast.Module) -> None:
        self._scope_of: dict[ast.AST, _Scope] = {}
        self.module = _Scope(None)
        self._scopes = [self.module]
        self._collect(tree, self.module)

    def qualified(self, node: ast.AST) -> str | None:
        """The dotted library name that a Name or a chain of attributes means, None for everything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        base = self._meaning(node.id, self._scope_of.get(node, self.module), 0)
        return None if base is None else canonical(".".join([base, *reversed(parts)]))

    def imports(self, prefix: str) -> bool:
        """Whether the module imports something of the library ``prefix`` anywhere."""
        meanings = [m for scope in self._scopes for m in scope.bindings.values() if isinstance(m, str)]
        return any(meaning == prefix or meaning.startswith(prefix + ".") for meaning in meanings)

    def _meaning(self, name: str, scope: _Scope, depth: int) -> str | None:
        found = scope.find(name)
        if found is None or depth > 8:
            return None
        home, meaning = found
        if isinstance(meaning, ast.expr):  # an alias: amp = torch.cuda.amp
            parts: list[str] = []
            while isinstance(meaning, ast.Attribute):
                parts.append(meaning.attr)
                meaning = meaning.value
            if not isinstance(meaning, ast.Name) or (meaning.id == name and not parts):
                return None
            base = self._meaning(meaning.id, home, depth + 1)
            return None if base is None else ".".join([base, *reversed(parts)])
        return meaning

    def _collect(self, root: ast.AST, scope: _Scope) -> None:
        # A stack of our own: generated sources nest deeper than Python's.
        pending: list[tuple[ast.AST, _Scope]] = [(root, scope)]
        while pending:
            node, scope = pending.pop()
            if isinstance(node, ast.Name):
                self._scope_of[node] = scope
                if not isinstance(node.ctx, ast.Load):
                    scope.bind(node.id, None)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, meaning in _imported(node):
                    scope.bind(name, meaning)
                continue
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                scope.bind(node.targets[0].id, node.value if _is_chain(node.value) else None)
                self._scope_of[node.targets[0]] = scope
                pending.append((node.value, scope))
                continue
            if isinstance(node, FunctionNode):
                if not isinstance(node, ast.Lambda):
                    scope.bind(node.name, None)
                    outside: list[ast.AST] = [*node.decorator_list, *([node.returns] if node.returns else [])]
                    pending.extend((part, scope) for part in outside)
                inner = _Scope(scope)
                self._scopes.append(inner)
                for arg in _arguments(node.args):
                    inner.bindings[arg.arg] = None
                    if arg.annotation is not None:
                        pending.append((arg.annotation, scope))
                pending.extend((part, scope) for part in [*node.args.defaults, *node.args.kw_defaults] if part)
                body = [node.body] if isinstance(node, ast.Lambda) else node.body
                pending.extend((part, inner) for part in reversed(body))
                continue
            if isinstance(node, ast.ClassDef):
                scope.bind(node.name, None)
                pending.extend((part, scope) for part in [*node.decorator_list, *node.bases, *node.keywords])
                inner = _Scope(scope, is_class=True)
                self._scopes.append(inner)
                pending.extend((part, inner) for part in reversed(node.body))
                continue
            if isinstance(node, ast.ExceptHandler) and node.name:
                scope.bind(node.name, None)
            pending.extend((child, scope) for child in reversed(list(ast.iter_child_nodes(node))))


def last_name(node: ast.AST) -> str:
    """The name of a Name, the last of a chain of attributes; "" for everything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@lru_cache(16384)
def canonical(name: str) -> str:
    """One name for what a library offers under several: ``torch.autocast`` and ``torch.nn.functional``."""
    for old, new in _SAME.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


_SAME = {
    "torch.autocast": "torch.amp.autocast",
    "torch.amp.autocast_mode.autocast": "torch.amp.autocast",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.autocast_mode": "torch.cuda.amp",
    "torch.nn.utils.clip_grad": "torch.nn.utils",
    "torch.half": "torch.float16",
    "torch.float": "torch.float32",
    "torch.double": "torch.float64",
    "pytorch_lightning": "lightning.pytorch",
    "lightning_fabric": "lightning.fabric",
    "lightning.Trainer": "lightning.pytorch.Trainer",
    "lightning.LightningModule": "lightning.pytorch.LightningModule",
    "lightning.Fabric": "lightning.fabric.Fabric",
}


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            # `import torch.cuda.amp` binds torch alone.
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif alias.name != "*":
            home = "." * node.level + (node.module or "")
            yield alias.asname or alias.name, f"{home}.{alias.name}" if node.module else home + alias.name


def _arguments(args: ast.arguments) -> Iterator[ast.arg]:
    yield from [*args.posonlyargs, *args.args, *args.kwonlyargs]
    yield from [arg for arg in (args.vararg, args.kwarg) if arg is not None]


def _is_chain(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
