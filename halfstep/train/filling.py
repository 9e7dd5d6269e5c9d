"""Weights that transformers reads one at a time, each at once as it is held: no model is ever in memory in fp32.

transformers lets a quantizer change the empty model before it is filled, and each weight while it is read; from files
of safetensors, which are mapped, that takes the memory of one weight beside what is held.
"""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfstep.train.four_bit import is_4_bit, pack
from halfstep.train.held import Held

_METHOD = "halfstep"


@register_quantization_config(_METHOD)
class Filling(QuantizationConfigMixin):
    """What ``from_pretrained(quantization_config=...)`` takes, so that weights are held as ``held`` says."""

    def __init__(self, held: Held) -> None:
        super().__init__(quant_method=_METHOD)
        self.held = held


@register_quantizer(_METHOD)
class Filler(HfQuantizer):
    """It leaves no mark on the model: what is loaded is as if it had been narrowed afterwards."""

    requires_calibration = False
    is_trainable = True

    def is_serializable(self) -> bool:
        return False

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return self.quantization_config.held.in_4_bit and name == "weight" and is_4_bit(model.get_submodule(path))

    def get_quantize_ops(self) -> Any:
        return _Pack(self.quantization_config.held.device)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.held.prepare(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del model.hf_quantizer, model.is_quantized, model.quantization_method, model.config.quantization_config
        for module in model.modules():
            vars(getattr(module, "config", self)).pop("_is_quantized", None)
        return model


class _Pack(ConversionOps):
    def __init__(self, device: str) -> None:
        self._device = device

    def convert(self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Weights by name, in fp32 as ``from_pretrained`` is told, and what is held in their place."""
        made = {}
        for name, found in input_dict.items():
            weight = found[0] if isinstance(found, list) else found
            layer = model.get_submodule(name.rpartition(".")[0])
            if name.endswith(".weight") and is_4_bit(layer):
                stored = (layer.out_features, layer.in_features)
                if tuple(weight.shape) != (stored[::-1] if layer.is_transposed else stored):
                    raise ValueError(f"{name} is {list(weight.shape)}, and the configuration has {list(stored)}")
                weight = pack(layer, weight, self._device)
            made[name] = weight
        return made
