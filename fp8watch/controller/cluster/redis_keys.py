"""The names of all Redis keys, so that an ACL can be written from one list.

Keys of a run have `{run}` as their hash tag, so that all of them are in one slot of a Redis Cluster and can be changed
atomically.
"""

from __future__ import annotations

PREFIX = "fp8watch"
LEASE = f"{PREFIX}:{{lease}}:holder"
"""`term:holder` of the active controller; expires with the lease."""
TERM = f"{PREFIX}:{{lease}}:term"
"""The newest lease term."""
RUNS = f"{PREFIX}:runs"
"""Set of the names of all runs."""
ACTIVE = f"{PREFIX}:active"
"""Set of the runs of which an agent has ranks."""
NODES = f"{PREFIX}:nodes"
"""Hash: node -> the latest status of its agent (JSON)."""
CONTROLLERS = f"{PREFIX}:controllers"
"""Hash: name of a controller -> its latest status (JSON)."""
DISARM = f"{PREFIX}:disarm"
"""If it exists, no action may be taken in any run."""
GROUP = "controller"
"""Name of the consumer group on every run's `frames` stream."""


class RunKeys:
    """The keys of one run."""

    def __init__(self, run: str) -> None:
        # A brace would end the hash tag, and an empty one is none. Two names never give the same keys.
        tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D") or "%"
        base = f"{PREFIX}:{{{tag}}}"
        self.frames = f"{base}:frames"
        """Stream: messages of the agents."""
        self.commands = f"{base}:commands"
        """Stream: messages of the controller."""
        self.run = f"{base}:run"
        """The `RunRecord`."""
        self.order = f"{base}:order"
        """Counter: the order in which records were first written."""
        self.approvals = f"{base}:approvals"
        """Hash: action id -> the newest verdict."""
        self.fence = f"{base}:fence"
        """Hash: term of the controller that may write, number of its last commit, and the same of the one before."""
        self.state = f"{base}:state"
        """Hash: the controller's memory of the run (`cluster.program.MEMORY_PARTS`)."""
        self.ranks = f"{base}:ranks"
        """Hash: `rank@node` -> the newest hello of this rank from this node; `layout@node` -> the node's layout."""
        self.disarm = f"{base}:disarm"
        """If it exists, no action may be taken in this run."""
        self.to_go_on = (self.frames, self.state, self.ranks, self.fence, self.commands)
        """What is needed only to go on with the run, and expires with its end."""
        self._base = base

    def kind(self, kind: str) -> str:
        """Hash: key -> record, for one kind of record."""
        return f"{self._base}:{kind}"

    def kind_order(self, kind: str) -> str:
        """Sorted set: the same keys in the order of first writing."""
        return f"{self._base}:{kind}:order"

    def presence(self, node: str) -> str:
        """Exists as long as the node's agent has ranks of the run."""
        return f"{self._base}:node:{node}"

    def contested(self, node: str) -> str:
        """Exists while the controller refuses what the node says of the run (`cluster.contest.Contest`)."""
        return f"{self._base}:contested:{node}"
