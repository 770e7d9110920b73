"""What one agent process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of one process. `run` set: embedded, started by that run's local rank 0 and ending with it."""

    socket: Path
    """Unix socket that ranks connect to; its folder must exist."""
    directory: Path
    """FP8WATCH_DIR, absolute: endpoints, targets and (where possible) stores lie under it."""
    run: str | None = None
    """Name of the one run served; None: any run, and the process stays."""
    parent_pid: int | None = None
    """Trainer that started this process; when it is gone before anybody connected, there is nothing to wait for."""
    any_user: bool = False
    """True: every user of the node may connect, and a run belongs to the user who began it."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    """A free one is taken when it is in use. 0: always a free one."""
    end_grace_seconds: float = 10.0
    """From the end of the last connection to the end of this process, at most."""
    connect_seconds: float = 20.0
    """How long an embedded process waits for the first rank."""
    series_budget: int = 5000
    """Series on /metrics, all runs together; beyond it the least important are left out and counted."""
    worst_layers: int = 10
    """Layers of a run that get series of their own, the worst first."""
    ended_ttl_seconds: float = 600.0
    """How long the series of a run that ended stay (a standing agent; an embedded one ends with its run)."""
    store_full_steps: int = 4096
    store_limit_bytes: int = 2 * 1024**3

    redis_url: str | None = None
    """Redis of the cluster; None: this process decides by itself for the runs of its node."""
    node: str = ""
    """Name of this node in a cluster."""
    spool_limit_bytes: int = 512 * 1024**2
    redis_keep_seconds: float = 600.0

    @property
    def is_cluster(self) -> bool:
        """Whether frames go to a controller elsewhere. An embedded process has its own."""
        return self.redis_url is not None and not self.is_embedded

    @property
    def is_embedded(self) -> bool:
        """Whether this process lives and dies with one run."""
        return self.run is not None
