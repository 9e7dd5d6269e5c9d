"""What a device does well: which formats it computes natively, and the published figures of known cards.

Unknown stays unknown: a card that the catalogue does not hold has no figures, and nothing is guessed from a similar
name. The format rules need no catalogue; they follow from the compute capability (CUDA), the architecture (ROCm) or the
instruction set (CPU). The module works without torch; only :func:`detect` imports it.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT


@dataclass(frozen=True)
class Card:
    """The published figures of one accelerator, as its vendor states them.

    memory_gib:         nominal memory; the driver keeps some of it, with ECC on GDDR memory up to 9%.
    bandwidth_gb_per_s: peak of the device memory, in 10^9 bytes per second.
    rates_tflops:       peak rate of dense matrix products (no sparsity) per format, in 10^12 operations per second,
                        with FP32 accumulation; a format that the card has no units for is absent.
    capability:         CUDA compute capability, None for other vendors.
    source:             the vendor document that states the figures, or what they follow from.
    """

    name: str
    architecture: str
    memory_gib: float
    bandwidth_gb_per_s: float
    rates_tflops: Mapping[str, float] = field(hash=False)
    capability: tuple[int, int] | None
    source: str


# GeForce desktop cards: name, CUDA cores, boost clock in MHz (reference, not Founders Edition), memory, bandwidth.
# fp32 is cores x clock x 2. The tensor-core rates with FP32 accumulation, which is half the FP16-accumulate rate on
# GeForce, are fixed multiples of it that the whitepaper of the architecture states.
_FP8 = ("e4m3", "e5m2")
_AMPERE = {"tf32": 1, "fp16": 2, "bf16": 2}
_GEFORCE = (
    ("Turing", (7, 5), {"fp16": 4}, "NVIDIA Turing GPU Architecture", (
        ("RTX 2060 6GB", 1920, 1680, 6, 336), ("RTX 2060 12GB", 2176, 1650, 12, 336),
        ("RTX 2060 SUPER", 2176, 1650, 8, 448), ("RTX 2070", 2304, 1620, 8, 448),
        ("RTX 2070 SUPER", 2560, 1770, 8, 448), ("RTX 2080", 2944, 1710, 8, 448),
        ("RTX 2080 SUPER", 3072, 1815, 8, 496), ("RTX 2080 Ti", 4352, 1545, 11, 616),
    )),
    ("Ampere", (8, 6), _AMPERE, "NVIDIA Ampere GA102 GPU Architecture", (
        ("RTX 3050 6GB", 2304, 1470, 6, 168), ("RTX 3050 8GB", 2560, 1777, 8, 224),
        ("RTX 3060 8GB", 3584, 1777, 8, 240), ("RTX 3060 12GB", 3584, 1777, 12, 360),
        ("RTX 3060 Ti", 4864, 1665, 8, 448), ("RTX 3070", 5888, 1725, 8, 448),
        ("RTX 3070 Ti", 6144, 1770, 8, 608), ("RTX 3080 10GB", 8704, 1710, 10, 760),
        ("RTX 3080 12GB", 8960, 1710, 12, 912), ("RTX 3080 Ti", 10240, 1665, 12, 912),
        ("RTX 3090", 10496, 1695, 24, 936), ("RTX 3090 Ti", 10752, 1860, 24, 1008),
    )),
    ("Ada", (8, 9), _AMPERE | dict.fromkeys(_FP8, 4), "NVIDIA Ada GPU Architecture", (
        ("RTX 4060", 3072, 2460, 8, 272), ("RTX 4060 Ti 8GB", 4352, 2535, 8, 288),
        ("RTX 4060 Ti 16GB", 4352, 2535, 16, 288), ("RTX 4070", 5888, 2475, 12, 504),
        ("RTX 4070 SUPER", 7168, 2475, 12, 504), ("RTX 4070 Ti", 7680, 2610, 12, 504),
        ("RTX 4070 Ti SUPER", 8448, 2610, 16, 672), ("RTX 4080", 9728, 2505, 16, 717),
        ("RTX 4080 SUPER", 10240, 2550, 16, 736), ("RTX 4090", 16384, 2520, 24, 1008),
    )),
    ("Blackwell", (12, 0), _AMPERE | dict.fromkeys(_FP8, 4), "NVIDIA RTX Blackwell GPU Architecture", (
        ("RTX 5060", 3840, 2497, 8, 448), ("RTX 5060 Ti 8GB", 4608, 2572, 8, 448),
        ("RTX 5060 Ti 16GB", 4608, 2572, 16, 448), ("RTX 5070", 6144, 2512, 12, 672),
        ("RTX 5070 Ti", 8960, 2452, 16, 896), ("RTX 5080", 10752, 2617, 16, 960),
        ("RTX 5090", 21760, 2407, 32, 1792),
    )),
)  # fmt: skip

# Data-centre cards, figures as stated: name, architecture, capability, memory, bandwidth, then the rates of
# fp32, tf32, fp16, bf16 and FP8 (0 where there are no units), source. Where a document states rates with sparsity
# only, they are halved. The MI250X is two devices to torch; its figures are those of one, half the card.
_H100, _V100 = "NVIDIA H100 Tensor Core GPU Architecture", "NVIDIA V100 Tensor Core GPU, datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU, datasheet"
_DATA_CENTRE = (
    ("V100 PCIe 16GB", "Volta", (7, 0), 16, 900, 14, 0, 112, 0, 0, _V100),
    ("V100 PCIe 32GB", "Volta", (7, 0), 32, 900, 14, 0, 112, 0, 0, _V100),
    ("V100 SXM2 16GB", "Volta", (7, 0), 16, 900, 15.7, 0, 125, 0, 0, _V100),
    ("V100 SXM2 32GB", "Volta", (7, 0), 32, 900, 15.7, 0, 125, 0, 0, _V100),
    ("V100S PCIe 32GB", "Volta", (7, 0), 32, 1134, 16.4, 0, 130, 0, 0, _V100),
    ("T4", "Turing", (7, 5), 16, 320, 8.1, 0, 65, 0, 0, "NVIDIA T4 Tensor Core GPU, datasheet"),
    ("A10", "Ampere", (8, 6), 24, 600, 31.2, 62.5, 125, 125, 0, "NVIDIA A10 Tensor Core GPU, datasheet"),
    ("A40", "Ampere", (8, 6), 48, 696, 37.4, 74.8, 149.7, 149.7, 0, "NVIDIA A40 GPU, datasheet"),
    ("A100 PCIe 40GB", "Ampere", (8, 0), 40, 1555, 19.5, 156, 312, 312, 0, _A100),
    ("A100 PCIe 80GB", "Ampere", (8, 0), 80, 1935, 19.5, 156, 312, 312, 0, _A100),
    ("A100 SXM4 40GB", "Ampere", (8, 0), 40, 1555, 19.5, 156, 312, 312, 0, _A100),
    ("A100 SXM4 80GB", "Ampere", (8, 0), 80, 2039, 19.5, 156, 312, 312, 0, _A100),
    ("L4", "Ada", (8, 9), 24, 300, 30.3, 60, 121, 121, 242.5, "NVIDIA L4 Tensor Core GPU, datasheet"),
    ("L40", "Ada", (8, 9), 48, 864, 90.5, 90.5, 181.05, 181.05, 362, "NVIDIA L40 GPU, datasheet"),
    ("L40S", "Ada", (8, 9), 48, 864, 91.6, 183, 362.05, 362.05, 733, "NVIDIA L40S GPU, datasheet"),
    ("H100 PCIe", "Hopper", (9, 0), 80, 2039, 51.2, 378, 756, 756, 1513, _H100),
    ("H100 SXM5", "Hopper", (9, 0), 80, 3352, 66.9, 494.7, 989.4, 989.4, 1978.9, _H100),
    ("H100 NVL", "Hopper", (9, 0), 94, 3900, 60, 417.5, 835.5, 835.5, 1670.5,
     "NVIDIA H100 Tensor Core GPU, datasheet"),
    ("H200 SXM5", "Hopper", (9, 0), 141, 4800, 67, 494.5, 989.5, 989.5, 1979,
     "NVIDIA H200 Tensor Core GPU, datasheet"),
    ("B200", "Blackwell", (10, 0), 180, 7700, 75, 1100, 2250, 2250, 4500,
     "NVIDIA Blackwell, datasheet (one GPU of HGX B200)"),
    ("MI250X", "CDNA 2", None, 64, 1638.4, 47.85, 0, 191.5, 191.5, 0,
     "AMD Instinct MI250X Accelerator, data sheet (one of two dies)"),
    ("MI300X", "CDNA 3", None, 192, 5300, 163.4, 653.7, 1307.4, 1307.4, 0,
     "AMD Instinct MI300X Accelerator, data sheet"),
)  # fmt: skip


def _catalogue() -> Iterator[Card]:
    for architecture, capability, multiples, source, rows in _GEFORCE:
        for name, cores, mhz, memory, bandwidth in rows:
            fp32 = 2e-6 * cores * mhz
            rates = {"fp32": round(fp32, 1)} | {format: round(times * fp32, 1) for format, times in multiples.items()}
            yield Card(name, architecture, memory, bandwidth, rates, capability, f"{source}; cores x boost clock")
    for name, architecture, dc_capability, memory, dc_bandwidth, *figures, fp8, source in _DATA_CENTRE:
        stated = zip(("fp32", "tf32", "fp16", "bf16", *_FP8), (*figures, fp8, fp8), strict=True)
        dc_rates = {format: float(rate) for format, rate in stated if rate}
        yield Card(name, architecture, memory, dc_bandwidth, dc_rates, dc_capability, source)


CARDS: tuple[Card, ...] = tuple(_catalogue())
"""The catalogue: GeForce desktop cards by generation, then data-centre cards."""


def card_table() -> str:
    """The catalogue as a Markdown table; ``docs/hardware.md`` holds this text."""
    head = ["card", "architecture", "capability", "GiB", "GB/s", *FORMATS, "source"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for card in CARDS:
        rates = [f"{card.rates_tflops[name]:g}" if name in card.rates_tflops else "" for name in FORMATS]
        sizes = [_dotted(card.capability) or "", f"{card.memory_gib:g}", f"{card.bandwidth_gb_per_s:g}"]
        lines.append("| " + " | ".join([card.name, card.architecture, *sizes, *rates, card.source]) + " |")
    return "\n".join(lines) + "\n"


def _words(text: str) -> set[str]:
    """Words of a device name: ``RTX3070Ti`` is three, ``80 GB`` and ``80GiB`` are both ``80gb``."""
    text = re.sub(r"(\d+)\s*gi?b\b", r"\1gb", text.lower())
    return set(re.findall(r"[a-z0-9.]+", re.sub(r"rtx|(?<=\d)ti|super\b", r" \g<0> ", text)))


_BRAND = {"nvidia", "geforce", "rtx", "tesla", "amd", "instinct"}
_FORM = re.compile(r"pcie|nvl|sxm\d?|\d+gb")
_ALSO = {"H100 SXM5": {"hbm3"}, "MI300X": {"oam"}}


def _candidates(text: str, memory_gib: float | None) -> list[Card]:
    found, words = [], _words(text)
    for card in CARDS:
        own = _words(card.name)
        model = {word for word in own - _BRAND if not _FORM.fullmatch(word)}
        extra = {f"{card.memory_gib:g}gb", *("sxm" for word in own if word.startswith("sxm"))}
        allowed = own | _BRAND | extra | _ALSO.get(card.name, set())
        fits = memory_gib is None or 0.88 <= memory_gib / card.memory_gib <= 1.02
        if model <= words <= allowed and fits:
            found.append(card)
    return found


def find_card(device_name: str, memory_gib: float | None = None) -> Card | None:
    """The card called ``device_name``, as torch reports it or as a person writes it; None if the catalogue has none.

    The name must hold every word of the card's model, and no word beyond the card's own: its brand, form factor and
    memory size. So a laptop, MIG or vGPU variant is unknown, never the desktop card. ``memory_gib`` is what the device
    reports and has to agree with the nominal size. A name that fits several cards is a HalfstepError that lists them.
    """
    found = _candidates(device_name, memory_gib)
    if len(found) > 1:
        names = ", ".join(repr(card.name) for card in found)
        raise HalfstepError(
            f"card {device_name!r}", f"{len(found)} known cards go by this name", f"Say which: {names}."
        )
    return found[0] if found else None


Verdicts = dict[str, tuple[bool, str]]

_CUDA_SINCE = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "e4m3": (8, 9), "e5m2": (8, 9)}
# Compute capability 7.5 covers Turing chips with tensor cores and without (GTX 16, MX, T400 to T2000); these have them.
_TURING_TENSOR = re.compile(r"\bRTX\b|\b(T4|T4G|T10|T40)\b", re.IGNORECASE)
# AMD targets by prefix: formats of the matrix units.
_ROCM = {
    "gfx908": {"fp16", "bf16"},
    "gfx90a": {"fp16", "bf16"},
    "gfx94": {"fp16", "bf16", "tf32"},
    "gfx950": {"fp16", "bf16", *_FP8},
    "gfx11": {"fp16", "bf16"},
    "gfx12": {"fp16", "bf16", *_FP8},
}
# Instructions as Linux names them: AVX-512 and AMX on x86, then Arm.
_CPU_FEATURES = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}


def _cuda(capability: tuple[int, int] | None, name: str) -> Verdicts:
    if capability is None:
        return dict.fromkeys(_CUDA_SINCE, (False, "the compute capability is unknown"))
    verdicts = {
        format: (
            capability >= since,
            f"in tensor cores since capability {_dotted(since)}, this is {_dotted(capability)}",
        )
        for format, since in _CUDA_SINCE.items()
    }
    if capability == (7, 5) and not _TURING_TENSOR.search(name):
        why = "Turing without tensor cores as far as its name tells; fp16 convolutions of GTX 16 cards give NaN"
        verdicts["fp16"] = (False, why)
    return verdicts


def _rocm(target: str) -> Verdicts:
    target = target.partition(":")[0]
    units = next((formats for prefix, formats in _ROCM.items() if target.startswith(prefix)), None)
    if units is None:
        return dict.fromkeys(_CUDA_SINCE, (False, f"halfstep does not know the matrix units of {target}"))
    verdicts = {
        format: (format in units, f"{target} has {'' if format in units else 'no '}{format} matrix units")
        for format in _CUDA_SINCE
    }
    if target.startswith("gfx94"):
        for format in _FP8:
            verdicts[format] = (False, f"{target} computes {format}fnuz, whose values differ from those of {format}")
    return verdicts


def _cpu(features: Collection[str]) -> Verdicts:
    verdicts = dict.fromkeys(_CUDA_SINCE, (False, "halfstep knows no CPU instructions for it"))
    for format, names in _CPU_FEATURES.items():
        has = [name for name in names if name in features]
        why = f"this CPU has {', '.join(has)}" if has else f"this CPU has none of {', '.join(names)}"
        verdicts[format] = (bool(has), why if has else f"{why}; cpu16 rounds to {format} and multiplies in fp32")
    return verdicts


def _mps() -> Verdicts:
    unknown = dict.fromkeys(_CUDA_SINCE, (False, "Apple GPUs are not known to compute it in hardware"))
    return unknown | {"fp16": (True, "every Apple GPU computes fp16")}


def native_formats(
    kind: str,
    *,
    name: str = "",
    capability: tuple[int, int] | None = None,
    target: str | None = None,
    features: Collection[str] = (),
) -> tuple[frozenset[str], dict[str, str]]:
    """The formats whose products a device computes in hardware, and a line of reason for each of the six formats.

    kind:       ``cuda`` (ROCm too), ``cpu`` or ``mps``; any other computes fp32 as far as halfstep knows.
    name:       device name; tells Turing cards with tensor cores from those without.
    capability: CUDA compute capability. ``torch.cuda.is_bf16_supported()`` is not asked: it counts emulation.
    target:     LLVM target of a ROCm device, such as ``gfx942``; it decides instead of ``capability``.
    features:   CPU instructions as Linux names them, such as ``avx512_bf16``.
    """
    verdicts: Verdicts = {"fp32": (True, "every device computes fp32")}
    if kind == "cuda":
        verdicts |= _cuda(capability, name) if target is None else _rocm(target)
    elif kind == "cpu":
        verdicts |= _cpu(features)
    elif kind == "mps":
        verdicts |= _mps()
    else:
        verdicts |= dict.fromkeys(_CUDA_SINCE, (False, f"halfstep does not know {kind} devices"))
    native = frozenset(format for format, (yes, _) in verdicts.items() if yes)
    return native, {format: verdicts[format][1] for format in FORMATS}


@dataclass(frozen=True)
class Hardware:
    """One device and what it computes.

    kind:       ``cuda`` (ROCm too), ``cpu`` or ``mps``. name: as the device reports it.
    capability: CUDA compute capability. memory_gib: memory of the device in GiB. card: its published figures.
                Each is None where it is unknown.
    native:     formats whose products run in hardware.
    emulated:   formats that halfstep's own CPU kernels serve (cpu16), at nearly the speed of fp32.
    why:        format to one line of reason, for each of the six formats.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    memory_gib: float | None = None
    card: Card | None = None
    native: frozenset[str] = frozenset({"fp32"})
    emulated: frozenset[str] = frozenset()
    why: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls,
        kind: str,
        name: str,
        *,
        capability: tuple[int, int] | None = None,
        memory_gib: float | None = None,
        target: str | None = None,
        features: Collection[str] = (),
    ) -> Hardware:
        """The description that follows from what a device reports; arguments as for :func:`native_formats`."""
        native, why = native_formats(kind, name=name, capability=capability, target=target, features=features)
        emulated = SIXTEEN_BIT - native if kind == "cpu" else frozenset()
        cards = _candidates(name, memory_gib) if kind == "cuda" else []
        return cls(kind, name, capability, memory_gib, cards[0] if len(cards) == 1 else None, native, emulated, why)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"native": sorted(self.native), "emulated": sorted(self.emulated)}


def detect(device: str | None = None) -> Hardware:
    """What ``device`` is and computes: ``cpu``, ``cuda``, ``cuda:1`` or ``mps``; None is CUDA if present, else the CPU.

    Raises HalfstepError for any other string, for a device that is not there, and without torch.
    """
    asked = "this machine's device" if device is None else f"device {device!r}"
    try:
        import torch
    except ImportError:
        raise HalfstepError(asked, "torch is not installed", "Run: pip install 'halfstep[torch]'") from None
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    parsed = re.fullmatch(r"(cpu|cuda|mps)(?::(\d+))?", str(device))
    if parsed is None:
        raise HalfstepError(asked, "halfstep knows no such device", "Use cpu, cuda, cuda:N or mps.")
    kind, index = parsed[1], int(parsed[2] or 0)
    if kind == "cpu":
        return Hardware.of("cpu", _cpu_name(), memory_gib=_ram_gib(), features=_cpu_features(torch.cpu))
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise HalfstepError(asked, "torch finds no Apple GPU", "Use cpu.")
        return Hardware.of("mps", platform.processor() or "Apple GPU")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch finds no usable GPU" if built else f"torch {torch.__version__} is built without CUDA and ROCm"
        raise HalfstepError(
            asked, why, "Check the driver, or use cpu." if built else "Install another build, or use cpu."
        )
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise HalfstepError(asked, f"torch sees {count} GPU{'s' * (count != 1)}", f"Use cuda:0 to cuda:{count - 1}.")
    found = torch.cuda.get_device_properties(index if parsed[2] else torch.cuda.current_device())
    target = str(found.gcnArchName) if torch.version.hip else None
    capability = None if target else (int(found.major), int(found.minor))
    memory_gib = found.total_memory / 2**30
    return Hardware.of("cuda", str(found.name), capability=capability, memory_gib=memory_gib, target=target)


def _dotted(capability: tuple[int, int] | None) -> str | None:
    return None if capability is None else f"{capability[0]}.{capability[1]}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def _cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine() or "CPU"


def _cpu_features(torch_cpu: object) -> frozenset[str]:
    """Of the instructions that matter, those that torch or Linux report. torch asks privately, so it may stop to."""
    known = {name for names in _CPU_FEATURES.values() for name in names}
    reported = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    found = known & set(reported[0].split()) if reported else set()
    for question, name in (("avx512_bf16", "avx512_bf16"), ("amx_tile", "amx_bf16"), ("amx_fp16", "amx_fp16")):
        if getattr(torch_cpu, f"_is_{question}_supported", bool)():
            found.add(name)
    return frozenset(found)


def _ram_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
