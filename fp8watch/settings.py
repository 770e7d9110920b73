"""Everything a person can configure that is not policy, each with its unit, default and reason.

Every field is also an environment variable `FP8WATCH_<FIELD>` (an empty one counts as unset). An argument of `attach`
wins over both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from fp8watch.bounds import MAX_NAME_LENGTH
from fp8watch.errors import BadInput

MAX_WAIT_SECONDS = 86_400.0
"""One day: the longest time that a process may be told to wait for others."""


class Settings(BaseSettings):
    """Settings of one process."""

    model_config = SettingsConfigDict(env_prefix="FP8WATCH_", frozen=True, extra="ignore", env_ignore_empty=True)

    dir: Path = Path(".fp8watch")
    """Where runs, stores and endpoints are kept."""

    agent: str | None = None
    """`unix:///run/fp8watch/agent.sock` of a node agent. None: a process of our own is started (embedded)."""

    run: str | None = None
    """Run name. None: made from date and a random suffix, the same on all ranks."""

    disarm: bool = False
    """True: watch and report, but let nothing act. Read again at every step boundary."""

    metrics_port: int = Field(default=9464, ge=0, le=65535)
    """Loopback port of /metrics; a free one is taken when it is in use. 0: always a free one."""

    metrics_tls_cert: Path | None = None
    """Certificate chain (PEM) with which /metrics is served as https; with `metrics_tls_key`."""

    metrics_tls_key: Path | None = None
    """Private key of that certificate (PEM), without a password."""

    metrics_client_ca: Path | None = None
    """Certificate authority (PEM) that must have issued a scraper's certificate."""

    metrics_password_file: Path | None = None
    """File with one line `name:password` that a scraper must send (HTTP basic authentication)."""

    statistics_every: int | None = Field(default=None, ge=1)
    """Steps between element counts (underflow, saturation). None: every step on a CPU, one in ten on a GPU."""

    what_if_every: int | None = Field(default=None, ge=0)
    """Steps between counts of what tensors would lose under other recipes. None: 64 on a CPU, 100 on a GPU. 0: only
    when the controller asks."""

    shadow_every: int | None = Field(default=None, ge=0)
    """Steps between shadow probes: one layer's GEMM run again in BF16, layer by layer. None: 64 on a CPU, 100 on a GPU.
    0: only when the controller asks."""

    overhead_budget: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the step time that these samples may take before they are taken less often. None: 0.01 on a GPU, no
    limit on a CPU, where FP8 itself is emulated."""

    queue_frames: int = Field(default=256, ge=1)
    """Frames that the training process holds for a slow or absent agent before it drops and counts them."""

    restart_limit: int = Field(default=1, ge=0)
    """How often an embedded process that died is started again."""

    connect_seconds: float = Field(default=20.0, gt=0, le=MAX_WAIT_SECONDS)
    """How long the transport thread tries to reach an agent before it reports it absent (it keeps trying)."""

    join_seconds: float = Field(default=60.0, gt=0, le=MAX_WAIT_SECONDS)
    """With several ranks and a policy that acts: how long attach waits for the other ranks to attach. After that the
    run is only observed."""

    start_seconds: float = Field(default=5.0, ge=0, le=MAX_WAIT_SECONDS)
    """With a policy that acts: how long attach waits for the process that decides, so that it can act from the first
    step on. After that training begins without it, and frames are held for it. 0: do not wait."""

    agreement_seconds: float = Field(default=600.0, gt=0, le=MAX_WAIT_SECONDS)
    """How long a rank waits for the others at a step boundary (NCCL's own default). Ranks that train together are never
    a step apart, and a rank that has died is noticed at once, so this is rarely reached."""

    end_grace_seconds: float = Field(default=10.0, gt=0, le=MAX_WAIT_SECONDS)
    """How long the embedded process may take to record the end after the last rank's socket has closed."""

    store_full_steps: int = Field(default=4096, ge=1)
    """Number of newest steps kept at full resolution."""

    store_limit_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """Size cap of the store; ledger and decisions are never dropped for it."""

    redis_url: SecretStr | None = None
    """Redis of a cluster: `redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port,host:port/service/db` or
    `redis+cluster://host:port` (docs/cluster.md). When set, the node's agent forwards to it and does not decide."""

    redis_keep_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """How long frames stay in Redis. Decisions, findings and checkpoints stay longer."""

    redis_keep_days: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long after its end everything else about a run stays in Redis. The active controller removes it then."""

    redis_keep_runs: int = Field(default=10_000, ge=1)
    """Most runs kept in Redis: of more, those that ended longest ago go before their time."""

    node: str | None = Field(default=None, max_length=MAX_NAME_LENGTH)
    """Name of this node, at most 256 characters. None: the host name."""

    spool_limit_bytes: int = Field(default=512 * 1024**2, ge=1024**2)
    """What a node's agent keeps on disk while Redis is away; the oldest frames are dropped first, and counted."""

    lease_seconds: float = Field(default=3.0, gt=0.2, le=MAX_WAIT_SECONDS)
    """How long a controller that has fallen silent remains the active one."""

    command_key: SecretStr | None = None
    """Secret with which the controller signs commands and training processes verify them; several keys, newest first,
    one per line. When set, unsigned commands are refused."""

    command_key_file: Path | None = None
    """File that contains `command_key`."""

    frame_key: SecretStr | None = None
    """Secret with which a node's agent authenticates what it sends to the controller through Redis."""

    frame_key_file: Path | None = None
    """File that contains `frame_key`."""

    approval_key: SecretStr | None = None
    """Secret with which the command line signs what a person approves or refuses, and the controller verifies it."""

    approval_key_file: Path | None = None
    """File that contains `approval_key`."""

    allow_unsigned: bool = False
    """True: a cluster without all three keys may act, because network and Redis are trusted. Otherwise its controller
    only observes, and its agents pass no command on."""

    report: bool = True
    """True: attach reports once, on rank 0, what is watched and what is not available."""

    log_level: Annotated[
        str, StringConstraints(to_upper=True, pattern=r"(?i)^(debug|info|warning|error|critical)$")
    ] = "INFO"
    """Level of the background process's log."""


def from_environment() -> Settings:
    """The settings from the environment. Raises `BadInput` that names every invalid variable."""
    try:
        return Settings()
    except ValidationError as error:
        raise BadInput(
            [f"environment:1: FP8WATCH_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()]
        ) from error
