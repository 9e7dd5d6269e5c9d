"""What becomes of a policy in a loop that cannot run a micro-batch again."""

from __future__ import annotations

from dataclasses import replace

from halfstep.hardware import Hardware
from halfstep.policy import Policy, resolve


def without_replay(policy: Policy, hardware: Hardware, is_alone: bool = True) -> Policy:
    """``policy``, which skips where it would replay, if it has a scale.

    is_alone: whether no other rank has a say in what ``auto`` becomes.
    """
    skips = replace(policy, on_overflow="skip")
    if policy.compute == "auto" and not is_alone:
        return skips
    return skips if resolve(policy, hardware)[0].scale.kind == "dynamic" else policy
