"""Names of all keys in Redis, so that an ACL can be written from one list.

What belongs to a run carries `{run}` as its hash tag: all of it lies in one slot of a Redis Cluster and can be
changed in one step.
"""

from __future__ import annotations

PREFIX = "fp8watch"
LEASE = f"{PREFIX}:{{lease}}:holder"
"""Who the active controller is; expires with the lease."""
TERM = f"{PREFIX}:{{lease}}:term"
"""Highest lease term given out."""
RUNS = f"{PREFIX}:runs"
"""Set of all runs' names."""
ACTIVE = f"{PREFIX}:active"
"""Set of runs that an agent has ranks of."""
NODES = f"{PREFIX}:nodes"
"""Hash: node -> what its agent last said of itself (JSON)."""
DISARM = f"{PREFIX}:disarm"
"""Exists: nothing may act, in any run."""
GROUP = "controller"
"""Name of the consumer group on every run's frames."""


class RunKeys:
    """Keys of one run."""

    def __init__(self, run: str) -> None:
        # A brace would begin or end another hash tag.
        tag = run.replace("{", "(").replace("}", ")")
        base = f"{PREFIX}:{{{tag}}}"
        self.frames = f"{base}:frames"
        """Stream: what agents send, in order."""
        self.commands = f"{base}:commands"
        """Stream: what the controller sends, in order."""
        self.run = f"{base}:run"
        """The run's record."""
        self.order = f"{base}:order"
        """Counter: the order in which records were first written."""
        self.approvals = f"{base}:approvals"
        """Hash: action id -> newest verdict."""
        self.fence = f"{base}:fence"
        """Hash: term of the controller that may write, number of its last commit."""
        self.state = f"{base}:state"
        """The controller's memory of the run (`fp8watch.controller.pilot_state`)."""
        self.ranks = f"{base}:ranks"
        """Hash: rank -> newest hello."""
        self.disarm = f"{base}:disarm"
        """Exists: nothing may act in this run."""
        self._base = base

    def kind(self, kind: str) -> str:
        """Hash of the records of one kind, by key."""
        return f"{self._base}:{kind}"

    def kind_order(self, kind: str) -> str:
        """Sorted set of the same keys in the order of first writing."""
        return f"{self._base}:{kind}:order"

    def presence(self, node: str) -> str:
        """Exists while the node's agent has ranks of the run."""
        return f"{self._base}:node:{node}"
