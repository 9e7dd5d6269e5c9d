"""The step, and what it does about a bad one."""

from halfstep.stepper.step import Event, Stepper

__all__ = ["Event", "Stepper"]
