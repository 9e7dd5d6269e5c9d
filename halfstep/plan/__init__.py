"""Memory and throughput of a training step before it runs, for a device that is not here."""

from halfstep.plan.planner import plan

__all__ = ["plan"]
