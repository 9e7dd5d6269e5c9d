"""What a rank holds that the others have to hold too: the rows of the precision contract.

A row says something of a rank: ``{"computes": "in bf16"}`` becomes "rank 3 computes in fp16, ranks 0-2 in bf16". What
lies on the device stays there, until ranks are known to differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from halfstep.dtypes import FORMAT_OF
from halfstep.gradients import local_of
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.ranks.digests import digest_of, fold, sum_of_bits
from halfstep.ranks.one import Ranks
from halfstep.scale import NoScale


@dataclass(frozen=True)
class Fact:
    """Rows of one topic, which is a key of :data:`halfstep.ranks.contract.TOPICS`.

    words:   what is said of a rank, such as "computes", to what it is there, such as "in bf16".
    tensors: the same of what lies on the device: to a number, or to a weight, of which the bits are compared.
    is_own:  whether this rank has a say. A rank that holds another shard takes part in the comparison without.
    """

    topic: str
    words: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_own: bool = True

    def digest(self) -> int | torch.Tensor | None:
        """A signed 64-bit number, on the device if that is where the fact is; None of what is not this rank's."""
        if not self.is_own:
            return None
        if not self.tensors:
            return digest_of(self.words)
        return fold([sum_of_bits(tensor) for tensor in self.tensors.values()])

    def in_words(self) -> dict[str, str]:
        """All rows in words. Reads from the device."""
        return {**self.words, **{what: _value(tensor) for what, tensor in self.tensors.items()}}


def facts_of_run(policy: Policy, requested: str, **settings: object) -> list[Fact]:
    """What was asked for. ``requested``: the policy's text as the user wrote it."""
    return [
        Fact("format", {"computes": f"in {policy.compute}"}),
        Fact("policy", {"has the policy": f"'{policy}'", "asks": f"for '{requested}'"}),
        Fact("settings", {f"sets {name}": f"to {_text(value)}" for name, value in settings.items()}),
    ]


def facts_of_machine(hardware: Hardware) -> list[Fact]:
    if hardware.kind == "cpu":
        chip = f"with {torch.backends.cpu.get_cpu_capability()} instructions"
    elif hardware.capability is not None:
        chip = f"with compute capability {'.'.join(map(str, hardware.capability))}"
    else:
        chip = f"on {hardware.kind}"
    formats = f"{', '.join(sorted(hardware.native))} in hardware"
    return [
        Fact("torch", {"runs": f"torch {torch.__version__}"}),
        Fact("device", {"computes": f"{chip}, {formats}"}),
    ]


def facts_of_model(ranks: Ranks) -> list[Fact]:
    """The engine's formats on the wire, and the parameters of the model."""
    parameters = {
        f"holds parameter {name}": f"in {_format_of(parameter)} of shape {tuple(parameter.shape)}, "
        f"{'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in ranks.module.named_parameters()
    }
    return [
        Fact("engine", {f"has as {name}": str(value) for name, value in ranks.describe().items()}),
        Fact("parameters", parameters),
    ]


def facts_of_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> list[Fact]:
    """Its class, its settings, the order of its parameters, and the formats of its states, whoever keeps them.

    names: of parameters, by their ids.
    """
    kind = type(optimizer)
    words, tensors = {"steps": f"with {kind.__module__}.{kind.__name__}"}, {}
    for number, group in enumerate(optimizer.param_groups):
        of_group = f"of parameter group {number}"
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                tensors[f"sets {name} {of_group}"] = value
            elif name != "params":
                words[f"sets {name} {of_group}"] = f"to {_text(value)}"
        for place, parameter in enumerate(group["params"]):
            words[f"moves in place {place} {of_group}"] = f"parameter {names.get(id(parameter), 'of another model')}"
    formats: dict[str, set[str]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            format = _format_of(value) if isinstance(value, torch.Tensor) else type(value).__name__
            formats.setdefault(str(name), set()).add(format)
    states = {f"keeps optimizer state {name}": f"in {' and '.join(sorted(all_))}" for name, all_ in formats.items()}
    return [Fact("optimizer", words), Fact("optimizer", tensors=tensors), Fact("states", states)]


def facts_of_rounding(seeds: Mapping[str, int | str], optimizer: Optimizer, ranks: Ranks) -> list[Fact]:
    """Random state of what rounds stochastically.

    seeds: what master weights draw by. An optimizer that draws from torch's own generator, as torchao's do with
    ``bf16_stochastic_round``, rounds replicas alike if their generators are in one state.
    """
    words = {f"rounds stochastically, by {name},": f"at {value}" for name, value in seeds.items()}
    if getattr(optimizer, "bf16_stochastic_round", False) and ranks.copies():
        device = ranks.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        found = hashlib.blake2b(state.numpy().tobytes(), digest_size=4).hexdigest()
        words["rounds stochastically, by torch's generator,"] = f"at its state {found}"
    return [Fact("rounding", words)]


def facts_of_progress(
    num_steps: int, num_micro_batches: int, unit: float | None, scale: NoScale, gradients: Mapping[str, torch.dtype]
) -> list[Fact]:
    """Where the run is. ``gradients``: formats of those of the last window, by parameter."""
    where = {
        "is": f"at step {num_steps}",
        "holds": f"{num_micro_batches} micro-batches of a window",
        "divides scaled sums": f"by {unit or 1.0:g}",
    }
    formats = {f"has the gradient of {name}": f"in {_name_of(dtype)}" for name, dtype in gradients.items()}
    value, *counters = scale.numbers().items()
    numbers = {"has a loss scale": value[1], **{f"counts {name} of the loss scale": each for name, each in counters}}
    return [Fact("counters", where), Fact("scale", tensors=numbers), Fact("gradients", formats)]


def facts_of_weights(ranks: Ranks, rests: Mapping[str, torch.Tensor | None]) -> list[Fact]:
    """The weights that several ranks hold alike, and ``rests``, what 16-bit ones leave out, by their names."""
    facts = []
    for copies in ranks.copies():
        tensors = {}
        for name, parameter in copies.parameters.items():
            tensors[f"holds parameter {name}"] = local_of(parameter)
            if (rest := rests.get(name)) is not None:
                tensors[f"holds the rest of master weight {name}"] = rest
        facts += [Fact("weights", {}, tensors, place == copies.place) for place in range(copies.num_places)]
    return facts


def _value(tensor: torch.Tensor) -> str:
    if tensor.dim() == 0:
        return f"at {tensor.item()!r}"
    return f"with checksum {sum_of_bits(tensor).item() % (1 << 64):016x}"


def _text(value: object) -> str:
    """Of a setting; an object without a text of its own by its class, since an address says nothing."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _format_of(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    is_plain = kind in ("Tensor", "Parameter", "DTensor")
    return _name_of(tensor.dtype) if is_plain else f"{_name_of(tensor.dtype)} as {kind}"


def _name_of(dtype: torch.dtype) -> str:
    format = FORMAT_OF.get(dtype)
    return format.name if format else str(dtype).removeprefix("torch.")
