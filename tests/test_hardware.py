"""The catalogue, the names of devices, and the rules of what is native; none of it needs the hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import halfstep.hardware as hardware_module
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS
from halfstep.hardware import CARDS, Hardware, card_table, detect, find_card, native_formats

DOCS = Path(__file__).parents[1] / "docs"

# Names as torch.cuda.get_device_name gives them, with the GiB that torch reports.
DEVICES = [
    ("Tesla V100-SXM2-16GB", 15.8, "V100 SXM2 16GB"),
    ("Tesla V100-SXM2-32GB", 31.7, "V100 SXM2 32GB"),
    ("Tesla V100-PCIE-32GB", 31.7, "V100 PCIe 32GB"),
    ("Tesla V100S-PCIE-32GB", 31.7, "V100S PCIe 32GB"),
    ("Tesla T4", 14.6, "T4"),
    ("NVIDIA A10", 22.0, "A10"),
    ("NVIDIA A40", 44.3, "A40"),
    ("A100-SXM4-40GB", 39.6, "A100 SXM4 40GB"),
    ("NVIDIA A100-SXM4-80GB", 79.2, "A100 SXM4 80GB"),
    ("NVIDIA A100-PCIE-40GB", 39.4, "A100 PCIe 40GB"),
    ("NVIDIA A100 80GB PCIe", 79.3, "A100 PCIe 80GB"),
    ("NVIDIA L4", 22.0, "L4"),
    ("NVIDIA L40", 44.4, "L40"),
    ("NVIDIA L40S", 44.4, "L40S"),
    ("NVIDIA H100 80GB HBM3", 79.1, "H100 SXM5"),
    ("NVIDIA H100 PCIe", 79.2, "H100 PCIe"),
    ("NVIDIA H100 NVL", 93.1, "H100 NVL"),
    ("NVIDIA H200", 139.8, "H200 SXM5"),
    ("NVIDIA B200", 178.4, "B200"),
    ("NVIDIA GeForce RTX 2060", 5.8, "RTX 2060 6GB"),
    ("GeForce RTX 2080 Ti", 10.8, "RTX 2080 Ti"),
    ("NVIDIA GeForce RTX 3060", 11.8, "RTX 3060 12GB"),
    ("NVIDIA GeForce RTX 3070", 7.8, "RTX 3070"),
    ("NVIDIA GeForce RTX 3080", 9.8, "RTX 3080 10GB"),
    ("NVIDIA GeForce RTX 3080", 11.8, "RTX 3080 12GB"),
    ("NVIDIA GeForce RTX 4060 Ti", 15.6, "RTX 4060 Ti 16GB"),
    ("NVIDIA GeForce RTX 4070", 11.6, "RTX 4070"),
    ("NVIDIA GeForce RTX 4070 SUPER", 11.6, "RTX 4070 SUPER"),
    ("NVIDIA GeForce RTX 4070 Ti", 11.6, "RTX 4070 Ti"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, "RTX 4070 Ti SUPER"),
    ("NVIDIA GeForce RTX 4090", 23.5, "RTX 4090"),
    ("NVIDIA GeForce RTX 5090", 31.4, "RTX 5090"),
    ("AMD Instinct MI250X", 64.0, "MI250X"),
    ("AMD Instinct MI300X", 192.0, "MI300X"),
]

# Real devices that are not in the catalogue though their name is close to one that is.
UNKNOWN = [
    ("NVIDIA GeForce RTX 3070 Laptop GPU", 7.8),
    ("NVIDIA GeForce RTX 2070 with Max-Q Design", 7.8),
    ("NVIDIA GeForce RTX 4090 D", 23.5),
    ("NVIDIA GeForce GTX 1660 Ti", 5.8),
    ("NVIDIA A10G", 22.0),
    ("NVIDIA RTX A4000", 15.7),
    ("NVIDIA RTX 4000 Ada Generation", 19.6),
    ("Quadro RTX 5000", 15.7),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8),
    ("NVIDIA H200 NVL", 139.8),
    ("NVIDIA GH200 480GB", 94.5),
    ("AMD Instinct MI250X/MI250", 64.0),
    ("AMD Radeon RX 7900 XTX", 24.0),
    ("NVIDIA GeForce RTX 3080 Ti", 19.6),
    ("NVIDIA", None),
    ("", None),
]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_has_plausible_figures(card):
    assert card.source
    assert card.memory_gib > 0
    assert card.bandwidth_gb_per_s > 0
    assert set(card.rates_tflops) <= set(FORMATS)
    # steps may be level: GeForce cards and the L40 run tf32 at the rate of fp32
    ladder = [card.rates_tflops[name] for name in ("fp32", "tf32", "fp16", "e4m3") if name in card.rates_tflops]
    assert ladder == sorted(ladder)
    assert card.rates_tflops["fp32"] < card.rates_tflops["fp16"]
    assert card.rates_tflops.get("bf16", card.rates_tflops["fp16"]) == card.rates_tflops["fp16"]
    assert card.rates_tflops.get("e4m3") == card.rates_tflops.get("e5m2")


@pytest.mark.parametrize("card", [card for card in CARDS if card.capability], ids=lambda card: card.name)
def test_a_card_has_rates_for_exactly_what_its_capability_computes(card):
    native, _ = native_formats("cuda", name=card.name, capability=card.capability)
    assert set(card.rates_tflops) == native


# Rates as the architecture whitepapers print them; the catalogue computes them from cores and boost clock.
@pytest.mark.parametrize(
    ("name", "format", "tflops"),
    [
        ("RTX 2080 Ti", "fp16", 53.8),
        ("RTX 2070", "fp32", 7.5),
        ("RTX 3090", "fp16", 71),
        ("RTX 3080 10GB", "bf16", 59.5),
        ("RTX 3070", "tf32", 20.3),
        ("RTX 4090", "fp16", 165.2),
        ("RTX 4090", "e4m3", 330.3),
        ("RTX 4080", "fp32", 48.7),
        ("RTX 5090", "bf16", 209.5),
        ("RTX 5090", "e4m3", 419),
        ("RTX 5080", "fp16", 112.6),
    ],
)
def test_computed_rates_are_those_of_the_whitepapers(name, format, tflops):
    card = find_card(name)
    assert card is not None
    # printed to the tenth or to the unit, so half a unit at most
    assert card.rates_tflops[format] == pytest.approx(tflops, abs=0.5)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_card_is_found_by_its_own_name(card):
    assert find_card(card.name) is card
    assert find_card(card.name.lower(), card.memory_gib) is card


@pytest.mark.parametrize(("device", "memory_gib", "name"), DEVICES)
def test_device_strings(device, memory_gib, name):
    card = find_card(device, memory_gib)
    assert card is not None
    assert card.name == name


@pytest.mark.parametrize(("device", "memory_gib"), UNKNOWN)
def test_unknown_stays_unknown(device, memory_gib):
    assert find_card(device, memory_gib) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3070", "RTX 3070"),
        ("rtx3070ti", "RTX 3070 Ti"),
        ("3070", "RTX 3070"),
        ("RTX 3080 12 GB", "RTX 3080 12GB"),
        ("a100 80gb sxm", "A100 SXM4 80GB"),
        ("H100 SXM", "H100 SXM5"),
        ("h100-pcie", "H100 PCIe"),
        ("H200 141GB", "H200 SXM5"),
        ("mi300x", "MI300X"),
    ],
)
def test_short_names(text, name):
    card = find_card(text)
    assert card is not None
    assert card.name == name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("H100", ("H100 PCIe", "H100 SXM5", "H100 NVL")),
        ("a100 80gb", ("A100 PCIe 80GB", "A100 SXM4 80GB")),
        ("RTX 3080", ("RTX 3080 10GB", "RTX 3080 12GB")),
    ],
)
def test_an_ambiguous_name_lists_what_it_may_be(text, names):
    with pytest.raises(HalfstepError) as caught:
        find_card(text)
    for name in names:
        assert repr(name) in str(caught.value)
        assert find_card(name) is not None


def test_memory_has_to_agree():
    assert find_card("NVIDIA GeForce RTX 3070", 7.8) is not None
    assert find_card("NVIDIA GeForce RTX 3070", 4.0) is None


SIXTEEN = {"fp16", "bf16"}
FP8 = {"e4m3", "e5m2"}


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("NVIDIA GeForce GTX 1080", (6, 1), set()),
        ("Tesla P100-PCIE-16GB", (6, 0), set()),
        ("Tesla V100-SXM2-16GB", (7, 0), {"fp16"}),
        ("Xavier", (7, 2), {"fp16"}),
        ("Tesla T4", (7, 5), {"fp16"}),
        ("NVIDIA GeForce RTX 2060", (7, 5), {"fp16"}),
        ("NVIDIA TITAN RTX", (7, 5), {"fp16"}),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), set()),
        ("NVIDIA GeForce GTX 1650", (7, 5), set()),
        ("NVIDIA T400 4GB", (7, 5), set()),
        ("Quadro T1000", (7, 5), set()),
        ("NVIDIA GeForce MX450", (7, 5), set()),
        ("NVIDIA A100-SXM4-80GB", (8, 0), SIXTEEN | {"tf32"}),
        ("NVIDIA GeForce RTX 3070", (8, 6), SIXTEEN | {"tf32"}),
        ("Orin", (8, 7), SIXTEEN | {"tf32"}),
        ("NVIDIA L4", (8, 9), SIXTEEN | {"tf32"} | FP8),
        ("NVIDIA H100 PCIe", (9, 0), SIXTEEN | {"tf32"} | FP8),
        ("NVIDIA GeForce RTX 5090", (12, 0), SIXTEEN | {"tf32"} | FP8),
        ("a device that says nothing", None, set()),
    ],
)
def test_cuda_rules(name, capability, expected):
    native, why = native_formats("cuda", name=name, capability=capability)
    assert native == expected | {"fp32"}
    assert list(why) == list(FORMATS)
    assert all(why.values())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("gfx906:sramecc+:xnack-", set()),
        ("gfx908:sramecc+:xnack-", SIXTEEN),
        ("gfx90a:sramecc+:xnack-", SIXTEEN),
        ("gfx942:sramecc+:xnack-", SIXTEEN | {"tf32"}),
        ("gfx950:sramecc+:xnack-", SIXTEEN | FP8),
        ("gfx1030", set()),
        ("gfx1100", SIXTEEN),
        ("gfx1201", SIXTEEN | FP8),
    ],
)
def test_rocm_rules(target, expected):
    # torch reports a capability such as (9, 4) here, which is no CUDA capability
    native, why = native_formats("cuda", capability=(9, 4), target=target)
    assert native == expected | {"fp32"}
    assert ("fnuz" in why["e4m3"]) == target.startswith("gfx94")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), set()),
        (("avx2", "avx512f"), set()),
        (("avx512_bf16",), {"bf16"}),
        (("amx_bf16",), {"bf16"}),
        (("amx_bf16", "avx512_fp16"), SIXTEEN),
        (("asimdhp",), {"fp16"}),
        (("asimdhp", "bf16"), SIXTEEN),
    ],
)
def test_cpu_rules(features, expected):
    hardware = Hardware.of("cpu", "some CPU", features=features)
    assert hardware.native == expected | {"fp32"}
    assert hardware.emulated == SIXTEEN - expected
    for format in hardware.emulated:
        assert "cpu16" in hardware.why[format]


def test_other_kinds_compute_what_is_known_of_them():
    assert native_formats("mps")[0] == {"fp32", "fp16"}
    assert native_formats("xpu")[0] == {"fp32"}
    assert Hardware.of("mps", "Apple M2").emulated == frozenset()


def test_a_description_travels_as_json():
    hardware = Hardware.of("cuda", "Tesla T4", capability=(7, 5), memory_gib=14.6)
    told = json.loads(json.dumps(hardware.to_dict()))
    assert told["card"]["name"] == "T4"
    assert told["native"] == ["fp16", "fp32"]
    assert told["emulated"] == []
    assert hash(hardware) == hash(Hardware.of("cuda", "Tesla T4", capability=(7, 5), memory_gib=14.6))


def test_a_slice_of_a_card_has_its_formats_but_not_its_figures():
    hardware = Hardware.of("cuda", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", capability=(8, 0), memory_gib=4.8)
    assert hardware.card is None
    assert "bf16" in hardware.native


def test_a_device_name_that_fits_several_cards_is_unknown_not_an_error():
    assert Hardware.of("cuda", "NVIDIA H100", capability=(9, 0), memory_gib=79.2).card is None


def test_the_module_imports_no_torch():
    code = "import sys, halfstep.hardware as h; h.find_card('Tesla T4'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_torch_the_catalogue_works_and_detect_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert find_card("Tesla T4") is not None
    with pytest.raises(HalfstepError, match=r"pip install 'halfstep\[torch\]'"):
        detect()


def test_detect_cpu():
    pytest.importorskip("torch")
    hardware = detect("cpu")
    assert hardware.kind == "cpu"
    assert hardware.name
    assert hardware.capability is None
    assert hardware.card is None
    assert "fp32" in hardware.native
    assert hardware.native | hardware.emulated >= SIXTEEN
    assert hardware.memory_gib is None or hardware.memory_gib > 0


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu,cuda", ""])
def test_detect_refuses_other_strings(device):
    pytest.importorskip("torch")
    with pytest.raises(HalfstepError, match=r"cpu, cuda, cuda:N or mps"):
        detect(device)


@pytest.fixture
def fake_cuda(monkeypatch):
    """A torch that sees two GPUs; device 1 is the current one."""
    torch = pytest.importorskip("torch")
    devices = [
        SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=int(14.6 * 2**30), gcnArchName=""),
        SimpleNamespace(
            name="AMD Instinct MI300X", major=9, minor=4, total_memory=192 * 2**30, gcnArchName="gfx942:sramecc+"
        ),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    return torch


def test_detect_reads_the_device_that_was_asked_for(fake_cuda, monkeypatch):
    hardware = detect("cuda:0")
    assert (hardware.name, hardware.capability) == ("Tesla T4", (7, 5))
    assert hardware.card is find_card("T4")
    monkeypatch.setattr(fake_cuda.version, "hip", "7.0")
    for device in ("cuda", None):
        hardware = detect(device)
        assert (hardware.name, hardware.capability) == ("AMD Instinct MI300X", None)
        assert hardware.native == SIXTEEN | {"fp32", "tf32"}


def test_detect_refuses_a_gpu_that_is_not_there(fake_cuda, monkeypatch):
    assert detect("cuda:1").kind == "cuda"
    with pytest.raises(HalfstepError, match=r"2 GPUs.*cuda:0 to cuda:1"):
        detect("cuda:2")
    monkeypatch.setattr(fake_cuda.cuda, "is_available", lambda: False)
    for built, why in ((None, "built without CUDA"), ("13.0", "no usable GPU")):
        monkeypatch.setattr(fake_cuda.version, "cuda", built)
        with pytest.raises(HalfstepError, match=why):
            detect("cuda")


def test_detect_mps(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert detect("mps").kind == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(HalfstepError, match="no Apple GPU"):
        detect("mps")


@pytest.mark.gpu
def test_detect_agrees_with_torch_on_bf16():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert ("bf16" in detect("cuda").native) == torch.cuda.is_bf16_supported(including_emulation=False)


@pytest.mark.parametrize(
    ("cpuinfo", "questions", "expected"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_fp16\n", {}, {"avx512_bf16", "amx_fp16"}),
        ("Features\t: fp asimd asimdhp bf16\n", {}, {"asimdhp", "bf16"}),
        ("", {"_is_amx_tile_supported": lambda: True}, {"amx_bf16"}),
        ("", {"_is_avx512_bf16_supported": lambda: False}, set()),
        ("bugs\t: bf16\n", {}, set()),
    ],
)
def test_cpu_features_come_from_linux_and_from_torch(monkeypatch, cpuinfo, questions, expected):
    monkeypatch.setattr(hardware_module, "_cpuinfo", lambda: cpuinfo)
    assert hardware_module._cpu_features(SimpleNamespace(**questions)) == expected


def test_docs_hold_the_catalogue():
    assert card_table() in (DOCS / "hardware.md").read_text(encoding="utf-8")
