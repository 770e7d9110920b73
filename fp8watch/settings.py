"""Everything a person can configure that is not policy, each with its unit, default and reason.

Every field is also an environment variable `FP8WATCH_<FIELD>` (an empty one is none); an argument of `attach` wins
over both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from fp8watch.errors import BadInput


class Settings(BaseSettings):
    """Settings of one process."""

    model_config = SettingsConfigDict(env_prefix="FP8WATCH_", frozen=True, extra="ignore", env_ignore_empty=True)

    dir: Path = Path(".fp8watch")
    """Where runs, stores and endpoints lie."""

    agent: str | None = None
    """`unix:///run/fp8watch/agent.sock` of a node agent. None: a process of our own is started (embedded)."""

    run: str | None = None
    """Run name. None: made from date and a random suffix, the same on all ranks."""

    disarm: bool = False
    """True: watch and report, but let nothing act. Read again at every step boundary."""

    metrics_port: int = Field(default=9464, ge=0, le=65535)
    """Loopback port of /metrics; a free one is taken when it is in use. 0: always a free one."""

    statistics_every: int | None = Field(default=None, ge=1)
    """Steps between element counts (underflow, saturation). None: every step on a CPU, one in ten on a GPU."""

    queue_frames: int = Field(default=256, ge=1)
    """Frames the training process holds for a slow or absent agent before it drops and counts."""

    restart_limit: int = Field(default=1, ge=0)
    """How often an embedded process that died is started again."""

    connect_seconds: float = Field(default=20.0, gt=0)
    """How long the transport thread tries to reach an agent before it reports it absent (it goes on trying)."""

    join_seconds: float = Field(default=60.0, gt=0)
    """With several ranks and a policy that acts: how long attach waits for the other ranks to attach too. After
    that the run is only observed."""

    agreement_seconds: float = Field(default=600.0, gt=0)
    """How long a rank waits for the others at a step boundary (as long as NCCL's own default): ranks that train
    together are never a step apart, and a rank that has died is noticed at once."""

    end_grace_seconds: float = Field(default=10.0, gt=0)
    """What the embedded process has to record the end after the last rank's socket closed."""

    store_full_steps: int = Field(default=4096, ge=1)
    """Newest steps kept at full resolution."""

    store_limit_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """Size cap of the store; ledger and decisions are never dropped for it."""

    report: bool = True
    """True: attach says once, on rank 0, what is watched and what is not available."""

    log_level: Annotated[
        str, StringConstraints(to_upper=True, pattern=r"(?i)^(debug|info|warning|error|critical)$")
    ] = "INFO"
    """Level of the background process's log."""


def from_environment() -> Settings:
    """The settings as the environment gives them. Raises `BadInput` that names every variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        raise BadInput(
            [f"environment:1: FP8WATCH_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()]
        ) from error
