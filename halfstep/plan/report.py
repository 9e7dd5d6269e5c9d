"""(moved; kept until who imports from here has followed)"""

from halfstep.plan.policy_plan import Outside, PolicyPlan

__all__ = ["Outside", "PolicyPlan"]
