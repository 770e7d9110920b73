"""Options of an agent process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Set once at the start. With `run` set the agent is embedded: local rank 0 of that run starts it, and it ends with
    the run."""

    socket: Path
    """Unix socket that ranks connect to. Its folder must exist."""
    directory: Path
    """FP8WATCH_DIR, absolute: folder of endpoints, targets and, where possible, stores."""
    run: str | None = None
    """The only run served; None: serve any run and do not exit."""
    parent_pid: int | None = None
    """Process ID of the trainer. If it exits before a rank has connected, the agent exits."""
    any_user: bool = False
    """Whether every user of the node may connect. A run then belongs to the user who started it."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    """If it is in use, a free port is taken. 0: always a free port."""
    end_grace_seconds: float = 10.0
    """Maximum time from the end of the last connection to the agent's exit."""
    connect_seconds: float = 20.0
    """How long an embedded process waits for the first rank."""
    series_budget: int = 5000
    """Maximum number of series on /metrics, of all runs. The least important ones are left out and counted."""
    worst_layers: int = 10
    """Number of layers per run with their own series, worst first."""
    ended_ttl_seconds: float = 600.0
    """How long the series of an ended run stay. An embedded agent exits with its run."""
    store_full_steps: int = 4096
    store_limit_bytes: int = 2 * 1024**3

    redis_url: str | None = None
    """Redis of the cluster; None: this process makes the decisions for the runs of its node."""
    node: str = ""
    """Name of this node in a cluster."""
    spool_limit_bytes: int = 512 * 1024**2
    redis_keep_seconds: float = 600.0

    @property
    def is_cluster(self) -> bool:
        """Whether frames go to the cluster's controller. An embedded agent has its own."""
        return self.redis_url is not None and not self.is_embedded

    @property
    def is_embedded(self) -> bool:
        """Whether this process serves one run and ends with it."""
        return self.run is not None
