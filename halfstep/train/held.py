"""How frozen weights are held beneath adapters, and a model without memory that is made ready to be filled so."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from halfstep.formats import SIXTEEN_BIT
from halfstep.plan.quantized import hold_base_in_16_bit
from halfstep.policy import Policy
from halfstep.train.four_bit import put_shells
from halfstep.train.settings import Settings


@dataclass(frozen=True)
class Held:
    """Matrices are held in the 16-bit format that ``policy`` computes them in; vectors and norms in fp32.

    in_4_bit: linear layers in NF4 on ``device`` instead, but for the output. policy: names modules without adapters.
    """

    policy: Policy
    in_4_bit: bool
    device: str

    @classmethod
    def by(cls, settings: Settings, policy: Policy, device: str) -> Held | None:
        """As ``settings`` hold them; None where all weights stay in fp32."""
        is_narrow = settings.lora and (policy.compute in SIXTEEN_BIT or bool(settings.quantize))
        return cls(policy, settings.quantize == "4bit", device) if is_narrow else None

    def prepare(self, skeleton: nn.Module) -> None:
        """Give ``skeleton``, on the meta device, the formats and the layers that it is filled in, in place."""
        skeleton.requires_grad_(False)
        if self.policy.compute in SIXTEEN_BIT:
            hold_base_in_16_bit(skeleton, self.policy)
        if self.in_4_bit:
            put_shells(skeleton, self.policy)
