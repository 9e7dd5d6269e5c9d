"""The rules, one file each. A file of this package that holds a ``RULE`` is a rule."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from halfstep.lint.rule import Rule


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    rules = [importlib.import_module(f"{__name__}.{name}").RULE for name in names]
    return tuple(sorted(rules, key=lambda rule: rule.code))
