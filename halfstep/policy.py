"""Policy: which operation and which module computes in which format, as one frozen value with a text form.

The same text stands in the flag, the log, the checkpoint and the report:

    bf16
    fp16 module:head=fp32 op:softmax=fp16 scale.init=256
    auto module:blocks.*.norm=fp32

The first word is the compute format, the rest are settings that differ from the defaults, separated by blanks and free
of commas, so that ``--policies "fp32,fp16 module:head=fp32"`` is a list of two. A name that ends in ``.toml`` is a
file.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.hardware import Hardware, detect

COMPUTE = ("auto", "fp32", "tf32", "bf16", "fp16")
RULE_FORMATS = ("fp32", "bf16", "fp16")
MASTERS = ("fp32", "copy", "split16", "split8", "kahan", "stochastic")
ON_OVERFLOW = ("replay", "skip")
ON_EXHAUSTED = ("stop", "promote")
PRESETS = {"default": 2.0**16, "conservative": 2.0**8}
"""First loss scales by name. The conservative one suits fine-tuning, where gradients are large from the first step."""


def _is_power_of_two(value: float) -> bool:
    fp32 = FORMATS["fp32"]
    return fp32.tiny <= value <= fp32.max and math.frexp(value)[0] == 0.5


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled. Every factor is a power of two, so that scaling itself never rounds.

    kind:       ``none``, ``static`` (stays at ``init``) or ``dynamic``.
    init:       first scale. growth, backoff: factors after ``interval`` clean steps and on an overflow.
    floor, ceiling: bounds of a dynamic scale; it is never 0, and an overflow at the floor is an exhausted scale.
    hysteresis: number of consecutive overflows that lower the scale; an isolated one below it is only skipped.

    The defaults are those of ``torch.amp.GradScaler`` (2^16, x2, x0.5, 2000), which has neither floor nor ceiling.
    """

    kind: str = "none"
    init: float = PRESETS["default"]
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("none", "static", "dynamic"):
            raise HalfstepError(f"scale={self.kind}", "no such loss scale", "Use none, static or dynamic.")
        for name in ("init", "growth", "backoff", "floor", "ceiling"):
            if not _is_power_of_two(getattr(self, name)):
                raise HalfstepError(
                    f"scale.{name}={getattr(self, name):g}",
                    "a loss scale is a power of two that fp32 holds, so that scaling a gradient never rounds it",
                    "Use a positive power of two such as 0.5, 1, 2 or 65536.",
                )
        for name, good in (
            ("growth", self.growth > 1),
            ("backoff", self.backoff < 1),
            ("interval", self.interval >= 1),
            ("hysteresis", self.hysteresis >= 1),
            ("init", self.kind != "dynamic" or self.floor <= self.init <= self.ceiling),
        ):
            if not good:
                raise HalfstepError(
                    f"scale.{name}={getattr(self, name):g}",
                    "it is out of range",
                    "Keep growth > 1, backoff < 1, interval and hysteresis >= 1, and floor <= init <= ceiling.",
                )


@dataclass(frozen=True)
class Policy:
    """Which operation and module computes in which format, and how the step keeps that safe.

    compute:      format of matrix products and convolutions: ``auto``, ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    modules:      rules (pattern of a module's qualified name, format); a rule covers the module and all inside it, the
                  innermost matching module decides, and of two rules for one module the later one.
    ops:          rules (name of an aten operation such as ``softmax``, format), stronger than torch's own lists. They
                  act where the region computes in 16 bit, so not inside a module that a rule keeps in fp32.
    master:       layout of the weights that the optimizer moves; ``fp32`` is autocast's way, any other keeps 16-bit
                  weights in the model (see ``halfstep.layouts``).
    tf32:         whether products that stay in fp32 may use TF32 tensor cores. Off: a rule that says fp32 means it.
    scale:        the loss scale; ``None`` picks a dynamic one for fp16 and none otherwise.
    on_overflow:  ``replay`` runs an overflowed micro-batch again at a lower scale, ``skip`` drops the step like torch.
    on_exhausted: what an overflow at the floor does: ``stop`` with a diagnosis, or ``promote`` the module at fault to
                  fp32 and go on.
    """

    compute: str
    modules: tuple[tuple[str, str], ...] = ()
    ops: tuple[tuple[str, str], ...] = ()
    master: str = "fp32"
    tf32: bool = False
    scale: LossScale = field(default=None)  # type: ignore[assignment]  # None only until __post_init__ has chosen
    on_overflow: str = "replay"
    on_exhausted: str = "stop"

    def __post_init__(self) -> None:
        _choose("compute format", self.compute, COMPUTE)
        for kind in ("module", "op"):
            rules = _settled(getattr(self, f"{kind}s"))
            object.__setattr__(self, f"{kind}s", rules)
            for name, format in rules:
                _choose(f"format of {kind}:{name}", format, RULE_FORMATS)
                if not name or re.search(r"[\s,=]", name):
                    raise HalfstepError(
                        f"{kind} rule {name!r}", "a name has no blank, comma or '='", "Correct the name."
                    )
        _choose("master", self.master, MASTERS)
        _choose("on_overflow", self.on_overflow, ON_OVERFLOW)
        _choose("on_exhausted", self.on_exhausted, ON_EXHAUSTED)
        if self.scale is None:
            object.__setattr__(self, "scale", default_scale(self.compute))
        if self.tf32 and self.compute in ("fp32", "tf32"):
            raise HalfstepError(
                f"{self.compute} tf32=on", "an fp32 policy with TF32 products has a name of its own", "Write tf32."
            )
        if self.scale.hysteresis > 1 and self.on_overflow == "replay" and self.scale.kind == "dynamic":
            raise HalfstepError(
                f"scale.hysteresis={self.scale.hysteresis} with on_overflow=replay",
                "a replay has to lower the scale at once, or it would overflow again",
                "Add on_overflow=skip, or leave hysteresis at 1.",
            )
        if self.master != "fp32" and self.compute in ("fp32", "tf32"):
            raise HalfstepError(
                f"{self.compute} master={self.master}",
                "this layout keeps 16-bit weights in the model, and the policy computes in no 16-bit format",
                "Compute in bf16 or fp16, or leave master out.",
            )
        low_ops = [f"op:{name}={format}" for name, format in self.ops if format in SIXTEEN_BIT]
        if self.compute in ("fp32", "tf32") and low_ops and not SIXTEEN_BIT & {format for _, format in self.modules}:
            raise HalfstepError(
                f"{self.compute} {' '.join(low_ops)}",
                "an op rule acts where a region computes in 16 bit, which is nowhere",
                "Compute in bf16 or fp16 and keep other operations or modules in fp32, or give a module 16 bit.",
            )

    @property
    def uses_tf32(self) -> bool:
        """Whether fp32 products run on TF32 tensor cores."""
        return self.compute == "tf32" or self.tf32

    @property
    def formats(self) -> frozenset[str]:
        """Every format that the policy asks a device for."""
        rules = {format for _, format in (*self.modules, *self.ops)}
        return frozenset({self.compute, *rules, *({"tf32"} if self.tf32 else ())} - {"auto"})

    def rule_of(self, module: str) -> str | None:
        """The format that a rule gives the module of this qualified name or one around it; the innermost match decides.

        Of two rules for one module it is the later.
        """
        while module:
            formats = [format for pattern, format in self.modules if fnmatch.fnmatchcase(module, pattern)]
            if formats:
                return formats[-1]
            module = module.rpartition(".")[0]
        return None

    def format_of(self, module: str) -> str:
        """The format that the module of this qualified name computes in, by a rule or as all do."""
        return self.rule_of(module) or self.compute

    def with_module(self, name: str, format: str) -> Policy:
        """The same policy with one more module rule."""
        return replace(self, modules=(*self.modules, (name, format)))

    def in_fp32(self, modules: Iterable[str]) -> Policy:
        """The same policy with these modules, by their qualified names, in fp32."""
        return replace(self, modules=(*self.modules, *((pattern_of(module), "fp32") for module in modules)))

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        """The policy that ``text`` spells: a preset, its text form, or the path of a ``.toml`` file.

        ``Policy.parse(str(policy)) == policy`` for every policy.
        """
        if isinstance(text, Policy):
            return text
        if text.strip().endswith(".toml"):
            return cls.load(Path(text.strip()))
        words = text.split()
        if not words:
            raise HalfstepError("an empty policy", "it names no format", f"Use one of {', '.join(COMPUTE)}.")
        settings: dict[str, Any] = {"compute": words[0], "modules": [], "ops": [], "scale": {}}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals:
                raise HalfstepError(
                    f"policy {text!r}", f"{word!r} is not of the form name=value", "See docs/policy.md."
                )
            if key.startswith("module:"):
                settings["modules"].append((key[7:], value))
            elif key.startswith("op:"):
                settings["ops"].append((key[3:], value))
            elif key == "scale":
                settings["scale"]["kind"] = value
            elif key.startswith("scale."):
                settings["scale"][key[6:]] = value
            elif key in ("compute", "modules", "ops"):
                raise HalfstepError(
                    f"policy {text!r}",
                    f"{key} is not set like this",
                    "Write the compute format first, a rule as module:NAME=fp32 or op:NAME=fp32.",
                )
            else:
                settings[key] = value
        return cls._build(settings)

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read the TOML form: keys as the fields, tables ``[modules]``, ``[ops]`` and ``[scale]``."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise HalfstepError(
                f"policy file {path}", f"cannot be read ({error.strerror})", "Check the path."
            ) from None
        except ValueError as error:
            raise HalfstepError(f"policy file {path}", f"is not TOML ({error})", "Correct the line it names.") from None
        for rules in ("modules", "ops"):
            table[rules] = list(_table(table, rules).items())
        table["scale"] = dict(_table(table, "scale"))
        return cls._build(table)

    @classmethod
    def _build(cls, settings: dict[str, Any]) -> Policy:
        """A policy from words or TOML values; one place knows the names and their types."""
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
                raise HalfstepError(f"policy setting {key!r}", "no such setting", hint)
        if "compute" not in settings:
            raise HalfstepError("a policy without compute", "it names no format", f"Add one of {', '.join(COMPUTE)}.")
        given = {key: value for key, value in settings.items() if key != "scale"}
        given["modules"] = tuple((str(name), str(format)) for name, format in settings["modules"])
        given["ops"] = tuple((str(name), str(format)) for name, format in settings["ops"])
        if "tf32" in given:
            given["tf32"] = _boolean("tf32", given["tf32"])
        if settings["scale"]:
            given["scale"] = _scale(default_scale(str(settings["compute"])), settings["scale"])
        return cls(**given)

    def __str__(self) -> str:
        words = [self.compute]
        words += [f"module:{name}={format}" for name, format in self.modules]
        words += [f"op:{name}={format}" for name, format in self.ops]
        plain = Policy(self.compute)
        words += [
            f"{name}={_text(getattr(self, name))}"
            for name in ("master", "tf32", "on_overflow", "on_exhausted")
            if getattr(self, name) != getattr(plain, name)
        ]
        for name, value in _changed(self.scale, plain.scale):
            words.append(f"scale={value}" if name == "kind" else f"scale.{name}={_text(value)}")
        return " ".join(words)

    def to_toml(self) -> str:
        """The file form; ``Policy.load`` of a file with this text gives the same policy."""
        plain = Policy(self.compute)
        lines = [f'compute = "{self.compute}"']
        for name in ("master", "on_overflow", "on_exhausted"):
            if getattr(self, name) != getattr(plain, name):
                lines.append(f'{name} = "{getattr(self, name)}"')
        if self.tf32:
            lines.append("tf32 = true")
        for table, rules in (("modules", self.modules), ("ops", self.ops)):
            if rules:
                lines += ["", f"[{table}]", *(f'{_quoted(name)} = "{format}"' for name, format in rules)]
        if changed := _changed(self.scale, plain.scale):
            lines += ["", "[scale]"]
            lines += [f'kind = "{value}"' if name == "kind" else f"{name} = {_text(value)}" for name, value in changed]
        return "\n".join(lines) + "\n"


def default_scale(compute: str) -> LossScale:
    """fp16 needs a loss scale, the formats with the range of fp32 do not."""
    return LossScale("dynamic") if compute == "fp16" else LossScale("none")


def auto_policy(hardware: Hardware | None = None) -> tuple[Policy, str]:
    """The policy that suits a device, and why: bf16, else fp16 with a dynamic loss scale, else fp32.

    ``hardware`` defaults to what :func:`halfstep.hardware.detect` finds on this machine.
    """
    hardware = detect() if hardware is None else hardware
    compute, why = "fp32", "has no 16-bit matrix instructions, so 16 bit would gain nothing"
    if "bf16" in hardware.native:
        compute, why = "bf16", "computes bf16 in hardware, which has the range of fp32 and needs no scale"
    elif "fp16" in hardware.native and hardware.kind == "cuda":
        compute, why = "fp16", "has fp16 tensor cores but no bf16; a dynamic loss scale guards its range"
    elif "fp16" in hardware.native:
        why = "computes fp16 but no bf16, and fp16 is chosen on tensor cores alone"
    return Policy(compute), f"{hardware.name} {why}"


def pattern_of(module: str) -> str:
    """The pattern of a module rule that matches the module of this name alone."""
    return re.sub(r"([*?[])", r"[\1]", module)


def check_module_rules(rules: Iterable[tuple[str, str]], modules: Iterable[str]) -> None:
    """Refuse a module rule that matches none of ``modules``, the names of a model's modules."""
    names = [name for name in modules if name]
    for pattern, _ in rules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise HalfstepError(
                f"module rule {pattern!r}",
                "no module of the model has a name that it matches",
                f"Names are those of model.named_modules(), such as {', '.join(names[:6]) or 'none, it has no parts'}.",
            )


def resolve(policy: str | Policy, hardware: Hardware, agreed: tuple[Policy, str] | None = None) -> tuple[Policy, str]:
    """The policy in effect on a device, and why it is that one.

    ``auto`` becomes a concrete policy and keeps its rules. A format that the device cannot do is refused with the
    alternatives; nothing is replaced in silence.

    agreed: what ``auto`` becomes, and why, where several devices have to agree on it.
    """
    policy = Policy.parse(policy)
    reason = "as asked for"
    able = hardware.native | hardware.emulated | {"fp32"}
    for format in sorted(policy.formats - able):
        choices = [name for name in ("bf16", "fp16", "tf32", "fp32") if name in able]
        raise HalfstepError(
            f"policy {policy}",
            f"{hardware.name} cannot compute {format} ({hardware.why.get(format, 'unknown')})",
            f"Use {', '.join(choices)}, or auto.",
        )
    if policy.compute == "auto":
        chosen, reason = agreed or auto_policy(hardware)
        scale = policy.scale if policy.scale.kind != "none" else replace(policy.scale, kind=chosen.scale.kind)
        master = policy.master if chosen.compute in SIXTEEN_BIT else "fp32"
        if master != policy.master:
            reason += f"; master={policy.master} keeps 16-bit weights, and has no use there"
        policy = replace(policy, compute=chosen.compute, scale=scale, master=master)
    if emulated := sorted(policy.formats & hardware.emulated):
        reason += (
            f"; {', '.join(emulated)} through cpu16, since {hardware.name} has no such matrix instructions: "
            "the numbers are those of 16 bit, the speed is not"
        )
    if policy.compute == "fp16" and policy.scale.kind == "none":
        reason += "; fp16 without a loss scale loses gradients below 6e-8"
    return policy, reason


def _settled(rules: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The rules without those that a later one for the same name overrides."""
    settled: dict[str, str] = {}
    for name, format in rules:
        settled.pop(name, None)
        settled[name] = format
    return tuple(settled.items())


def _choose(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        hint = f"Use one of {', '.join(choices)}."
        if str(value) in FORMATS and value not in SIXTEEN_BIT:
            hint = f"{value} is a format that no region computes in. {hint}"
        raise HalfstepError(f"{what} {value!r}", "not a value that it can take", hint)


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise HalfstepError(
            f"policy file: {name} = {table!r}", "it has to be a table", f"Write [{name}] and its lines."
        )
    return table


def _boolean(name: str, value: object) -> bool:
    words = {"on": True, "true": True, "off": False, "false": False}
    text = str(value).lower()
    if text not in words:
        raise HalfstepError(f"{name}={value}", "it is a switch", "Use on or off.")
    return words[text]


def _scale(plain: LossScale, settings: Mapping[str, Any]) -> LossScale:
    given: dict[str, Any] = {}
    types = {f.name: f.type for f in fields(LossScale)}
    for name, value in settings.items():
        if name == "kind":
            preset = PRESETS.get(str(value))
            given |= {"kind": str(value)} if preset is None else {"kind": "dynamic", "init": preset}
        elif name in types:
            try:
                given[name] = int(str(value)) if types[name] == "int" else float(str(value))
            except ValueError:
                raise HalfstepError(f"scale.{name}={value}", "it is a number", "Write one, such as 2048.") from None
        else:
            raise HalfstepError(f"policy setting 'scale.{name}'", "no such setting", f"Known: {', '.join(types)}.")
    return replace(plain, **given)


def _changed(scale: LossScale, plain: LossScale) -> list[tuple[str, Any]]:
    return [(f.name, getattr(scale, f.name)) for f in fields(scale) if getattr(scale, f.name) != getattr(plain, f.name)]


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(value: object) -> str:
    """A value as policy text: exact, so that parsing it gives the same number."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)
