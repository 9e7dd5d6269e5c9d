"""What this machine can train in: the device, its formats, the TF32 switches, the versions, and the policy of ``auto``.

:func:`examine` only looks. It changes no switch, allocates nothing on the device, and still reports without torch.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from halfstep import __version__
from halfstep.formats import FORMATS
from halfstep.hardware import Hardware, detect
from halfstep.policy import auto_policy

NATIVE, THROUGH_CPU16, NOT_AT_ALL = "native", "through cpu16", "not at all"
MISSING_TORCH = "torch is not installed, so nothing can train here. Run: pip install 'halfstep[torch]'"
UNREADABLE = "unreadable: set through both the old and the new names"


@dataclass(frozen=True)
class FormatSupport:
    """How the device computes one format: ``native``, ``through cpu16`` or ``not at all``, and why."""

    how: str
    why: str


@dataclass(frozen=True)
class DoctorReport:
    """What :func:`examine` found.

    problem:       what keeps this machine from training, else None; then all but ``versions`` is empty.
    hardware:      the device and its card.
    formats:       each of the six formats to how the device computes it.
    tf32:          name of each TF32 switch of torch to its value as it is set now.
    versions:      package or runtime to its version, or ``not installed``.
    policy:        what ``auto`` means here, as policy text. policy_reason: why.
    """

    problem: str | None
    hardware: Hardware | None
    formats: Mapping[str, FormatSupport]
    tf32: Mapping[str, str]
    versions: Mapping[str, str]
    policy: str | None
    policy_reason: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "hardware": self.hardware.to_dict() if self.hardware else None,
            "formats": {name: asdict(support) for name, support in self.formats.items()},
            "tf32": dict(self.tf32),
            "versions": dict(self.versions),
            "policy": self.policy,
            "policy_reason": self.policy_reason,
        }

    def __str__(self) -> str:
        versions = f"versions  {', '.join(f'{name} {version}' for name, version in self.versions.items())}"
        if self.hardware is None:
            return f"problem   {self.problem}\n{versions}"
        lines = [f"device    {_describe(self.hardware)}", f"card      {_figures(self.hardware)}", "formats"]
        lines += [f"  {name:5} {support.how:14} {support.why}" for name, support in self.formats.items()]
        width = max(map(len, self.tf32), default=0)
        lines += ["TF32 switches", *(f"  {name:{width}}  {value}" for name, value in self.tf32.items())]
        lines += [versions, f"policy    auto means {self.policy}: {self.policy_reason}"]
        return "\n".join(lines)


def examine(device: str | None = None) -> DoctorReport:
    """Look at ``device``: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or None for CUDA if present, else the CPU.

    Raises HalfstepError for a device that is not there. Without torch the report says so in ``problem``.
    """
    try:
        import torch  # noqa: F401  only asks whether it is there
    except ImportError:
        return DoctorReport(MISSING_TORCH, None, {}, {}, _versions(), None, None)
    hardware = detect(device)
    policy, reason = auto_policy(hardware)
    return DoctorReport(None, hardware, support_of(hardware), _tf32_switches(), _versions(), str(policy), reason)


def support_of(hardware: Hardware) -> dict[str, FormatSupport]:
    """How ``hardware`` computes each of the six formats, in their usual order."""
    support = {}
    for name in FORMATS:
        how = NATIVE if name in hardware.native else THROUGH_CPU16 if name in hardware.emulated else NOT_AT_ALL
        support[name] = FormatSupport(how, hardware.why.get(name, "unknown"))
    return support


def _tf32_switches() -> dict[str, str]:
    import torch

    switches: dict[str, Callable[[], object]] = {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
        "torch.backends.cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
        "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    }
    return {name: _read(read) for name, read in switches.items()}


def _read(read: Callable[[], object]) -> str:
    """One switch as text. torch refuses to read the old names once a new one was set to something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch deprecate the old names, also for reading
        try:
            return str(read())
        except RuntimeError:
            return UNREADABLE


def _versions() -> dict[str, str]:
    versions = {"halfstep": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    try:
        import torch
    except ImportError:
        return versions
    versions["torch"] = torch.__version__
    versions["cuda"] = torch.version.cuda or "none"
    versions["rocm"] = torch.version.hip or "none"
    return versions


def _describe(hardware: Hardware) -> str:
    parts = [hardware.name, hardware.kind]
    if hardware.capability:
        parts.append("capability {}.{}".format(*hardware.capability))
    parts.append("memory unknown" if hardware.memory_gib is None else f"{hardware.memory_gib:.1f} GiB")
    return ", ".join(parts)


def _figures(hardware: Hardware) -> str:
    if hardware.card is None:
        return "unknown, so there are no published rates and bandwidth to compare with"
    rates = ", ".join(f"{name} {rate:g}" for name, rate in hardware.card.rates_tflops.items())
    return f"{hardware.card.name}: {hardware.card.bandwidth_gb_per_s:g} GB/s; dense TFLOPS {rates}"
