"""What may be done about a finding, with whose permission and how often: schema, ladder, budgets, the pure decision.

`fp8watch.policy.load.load` reads a file; `decide` is a pure function of policy, state and view.
"""

from __future__ import annotations

from fp8watch.policy.load import load
from fp8watch.policy.schema import Policy, arms_skip_update

__all__ = ["Policy", "arms_skip_update", "load"]
