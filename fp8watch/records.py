"""The records that travel between training rank, agent, controller and store.

All are frozen `msgspec` structs with a tag, so one decoder reads any of them (`fp8watch.wire`).
"Not observed" is an absent scalar, an absent column or a cleared validity bit: never 0 and never NaN.
A NaN or infinity in a scalar is an observation.

Who sends what: a rank sends `Hello`, `Layout`, `StepFrame`, `CheckpointRecord`, `CommandResult`,
`Evaluation` and `Goodbye`; it receives `Welcome`, `Command` and `LedgerUpdate`. The controller adds
`Finding` and `ActionRecord` to the store.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fp8watch.journal import Arrival as Arrival
from fp8watch.journal import TraceEntry as TraceEntry
from fp8watch.vocabulary import ACTIONS as ACTIONS
from fp8watch.vocabulary import DETECTORS as DETECTORS
from fp8watch.vocabulary import Cause as Cause
from fp8watch.vocabulary import CheckpointLabel as CheckpointLabel
from fp8watch.vocabulary import Mode as Mode
from fp8watch.vocabulary import Outcome as Outcome
from fp8watch.vocabulary import Severity as Severity
from fp8watch.vocabulary import Verb as Verb


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every record."""


class TensorColumn(Record, frozen=True, kw_only=True):
    """One quantized tensor of one module: a position in every per-tensor column of a frame."""

    module: str
    """Qualified module name, e.g. `blocks.3.mlp.down`: the identity by which ranks are matched."""
    tensor: Literal["input", "weight", "output", "grad_output", "grad_input"]
    block: str
    """Transformer block the module belongs to (`3`), or the top-level name (`head`)."""
    fp8_format: str
    """Key of `fp8watch.formats.FORMATS`."""
    recipe: str = "delayed"
    """delayed, current, block, mxfp8, nvfp4."""
    history_len: int = 1
    """Updates that the amax window holds (delayed scaling; micro-batches count, not steps)."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: float = 0.0
    """Head-room in powers of two: scale = fp8_max / amax / 2^margin."""
    source: Literal["tapped", "read", "measured"] = "read"
    """How the numbers are obtained."""

    @property
    def name(self) -> str:
        """`module:tensor`, the way a finding names a tensor."""
        return f"{self.module}:{self.tensor}"


class Layout(Record, frozen=True, kw_only=True, tag="layout"):
    """The order of the per-tensor columns, announced once and again whenever it or a recipe changes."""

    run: str
    attempt: int
    rank: int
    layout_id: int
    columns: list[TensorColumn]
    expected_modules: int
    observed_modules: int
    not_observable: list[str] = []
    """`name: reason` of what cannot be seen."""
    aliases: dict[str, list[str]] = {}
    """Modules and parameters that the model holds in several places: the name they go by here -> their other names."""


class Column(Record, frozen=True, kw_only=True):
    """A packed little-endian array, one element a tensor; read it through `fp8watch.columns`."""

    dtype: Literal["f4", "u8", "u1"]
    data: bytes
    valid: bytes | None = None
    """Validity bitmap (numpy packbits, little bit order); None: every element was observed."""


class StepFrame(Record, frozen=True, kw_only=True, tag="frame"):
    """One rank, one optimizer step. (run, attempt, rank, step) is unique.

    `scalars` keys: loss (raw, mean of micro-batches), loss_micro_max and loss_micro_median (of a step's several
    micro-batches), grad_norm (before clipping, after unscaling),
    learning_rate, clip_limit, loss_scale, step_seconds, tokens, samples (consumed so far), update_rms,
    update_ratio (RMS of the update over the RMS of the parameters, matrices only),
    update_skipped (1.0 when the optimizer step was skipped), bf16_modules, overhead_seconds,
    lr_factor (ours, 1.0 when untouched), param_nonfinite (1.0 when a parameter sample is not finite).

    `columns` keys: amax (f4, after reduction, maximum over the step's micro-batches), amax_last (f4, last
    micro-batch; absent: equal to amax), amax_local (f4, as amax but before the reduction across ranks: this rank's own;
    absent: equal to amax), scale (f4, the one used by this step's last cast), high_precision
    (u1, 1: the module ran in BF16 this step), and on sampled steps quantized, saturated, underflowed,
    nonfinite (u8 element counts), mse, snr (f4), of casts with a scale a row or block also blocks, clipped_blocks (u8)
    and scale_spread (f4, log2 of largest over smallest); now and then those of `fp8watch.what_if.COLUMNS`, and
    shadow_error (f4, on a probed module's input). Scalars and columns of samples: docs/capture.md, "Closer looks".
    """

    run: str
    attempt: int
    rank: int
    step: int
    """Updates done before this one plus one: the first optimizer step is 1."""
    layout_id: int
    time_unix: float
    scalars: dict[str, float]
    columns: dict[str, Column] = {}
    updates_forward: int = 1
    """Scale updates the forward tensors saw in this step (micro-batches)."""
    updates_backward: int = 1
    dropped: dict[str, int] = {}
    """Messages this rank's transport has dropped since it was attached, by reason; filled in by the channel."""
    arrival: int = 0
    """Its place among all that the controller was told of the run (`Arrival.sequence`); 0: not numbered."""


class NodeFrame(Record, frozen=True, kw_only=True, tag="node"):
    """All local ranks of one node, one optimizer step: what leaves a node in cluster mode.

    Per-tensor columns are reduced over the node's ranks, matched by module name: amax, saturated and other counts as
    in `fp8watch.controller.merge`; the scale is that of the rank nearest to clipping. `amax_rank` (u1) is the index
    into `ranks` of the rank that held the largest amax, `amax_low` (f4) the smallest amax of any rank: together
    with `amax` the spread across ranks. Scalars are kept rank by rank: they are few, and what ranks differ in tells
    a faulty device from a numerical fault.
    """

    run: str
    attempt: int
    node: str
    rank: int
    """Lowest local rank: `layout_id` is one of its layouts."""
    step: int
    layout_id: int
    time_unix: float
    ranks: list[int]
    """Ranks whose frames are in it, in order."""
    scalars: list[dict[str, float]]
    """As in `StepFrame`, one for each of `ranks`."""
    columns: dict[str, Column] = {}
    updates_forward: int = 1
    updates_backward: int = 1
    dropped: dict[str, int] = {}
    """Messages lost on this node so far, by reason, all ranks and the agent together."""


class RankLost(Record, frozen=True, kw_only=True, tag="lost"):
    """A node's agent says that a rank went without a goodbye and did not come back."""

    run: str
    rank: int
    node: str


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank on a connection, and again after a rollback (a new attempt)."""

    wire_version: int
    run: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    pid: int
    host: str
    time_unix: float
    step: int
    policy: str | None = None
    """Text of the policy file (YAML); None: observe."""
    policy_name: str = "observe"
    capabilities: dict[str, str] = {}
    """Action -> empty string when available, else the reason why it is not."""
    warmup_steps: int | None = None
    """Length of the scheduler's warm-up where it is known."""
    is_warming_up: bool = False
    """The learning rate has risen from the first step on, and where that ends is not known yet."""
    num_parameters: int = 0
    framework: dict[str, str] = {}
    """Versions: python, torch, transformer_engine, fp8watch; recipe; device."""
    expected_modules: int = 0
    observed_modules: int = 0
    journal_term: int = 0
    """Highest command term this rank has seen."""
    armed: bool = True
    tensor_group: list[int] = []
    """Ranks that hold parts of the same tensors as this one (tensor parallelism), this one among them: they have to
    use the same scales. Empty: not told."""


class Welcome(Record, frozen=True, kw_only=True, tag="welcome"):
    """The agent's answer to a hello."""

    wire_version: int
    run: str
    term: int
    metrics_url: str = ""
    store: str = ""
    warnings: list[str] = []
    """What a person should know about the agent: a store that could not be written, a missing package."""


class Command(Record, frozen=True, kw_only=True, tag="command"):
    """One verb of one action, to be applied by all ranks at the same boundary or by none."""

    id: str
    run: str
    attempt: int
    term: int
    sequence: int
    verb: Verb
    action: str
    params: dict[str, Any] = {}
    last_step: int
    """No rank begins it after this optimizer step."""
    because: dict[str, Any] = {}
    """What it rests on: `onset_step`, `rank` (the one it concerns, where it is one), `tensors`. Ranks compare it with
    what they have seen themselves (`fp8watch.training.evidence`)."""
    signature: bytes = b""


class CommandResult(Record, frozen=True, kw_only=True, tag="result"):
    """What became of a command on a rank."""

    id: str
    run: str
    attempt: int
    rank: int
    verb: Verb
    step: int
    """Boundary at which it was applied, or at which it was refused."""
    status: Literal["applied", "failed", "vetoed", "expired", "unavailable", "unknown"]
    readback: Literal["ok", "failed", "pending"] = "pending"
    detail: str = ""
    observed: dict[str, Any] = {}
    """What was read back: effective LR, clip limit, precision, scale."""
    steps_replayed: int = 0


class LedgerUpdate(Record, frozen=True, kw_only=True, tag="ledger"):
    """The controller's verdict on a checkpoint."""

    run: str
    checkpoint: str
    label: CheckpointLabel
    reason: str = ""
    issued_ns: int = 0
    """Unix time in nanoseconds at which it was given, so that an old verdict cannot be brought up again."""
    signature: bytes = b""


class Inquiry(Record, frozen=True, kw_only=True, tag="inquiry"):
    """The controller wants a closer look at layers. It changes nothing in training, and no rank answers it."""

    run: str
    attempt: int
    step: int
    """Of the finding that it is about."""
    modules: list[str]


class CheckpointRecord(Record, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint as the ledger knows it."""

    run: str
    attempt: int
    checkpoint: str
    step: int
    """Updates done when it was saved."""
    path: str
    """Its folder; empty once rotation has removed it."""
    label: CheckpointLabel
    reason: str = ""
    has_data_position: bool = False
    samples: int = 0
    """Samples consumed up to it."""
    time_unix: float = 0.0


class Evaluation(Record, frozen=True, kw_only=True, tag="evaluation"):
    """Evaluation scores, as recorded by `watch.evaluation`."""

    run: str
    attempt: int
    step: int
    scores: dict[str, float]


class Goodbye(Record, frozen=True, kw_only=True, tag="goodbye"):
    """A rank is leaving of its own will."""

    run: str
    rank: int
    step: int
    reason: str = "end"
    """end, detached, halted, ranks apart, or `error: <exception>`."""
    dropped: dict[str, int] = {}
    """As in `StepFrame`."""


class Finding(Record, frozen=True, kw_only=True, tag="finding"):
    """Something is wrong with a run: what, since when, where, why, and the evidence for it."""

    id: str
    run: str
    attempt: int
    step: int
    """Step of the alarm."""
    onset_step: int
    detector: str
    severity: Severity
    cause: Cause
    tensor: str | None = None
    """`module:tensor` of the worst tensor, where there is one."""
    layer: str | None = None
    """Module of the worst tensor."""
    rank: int | None = None
    layers: list[str] = []
    """All modules concerned, worst first."""
    evidence: dict[str, Any] = {}
    incident: str = ""
    """Findings of one event share it."""


class ActionRecord(Record, frozen=True, kw_only=True, tag="action"):
    """The life of one action; a later record with the same id replaces an earlier one."""

    id: str
    run: str
    attempt: int
    action: str
    params: dict[str, Any]
    rule: str
    finding: str
    """Id of the finding that asked for it."""
    incident: str = ""
    mode: Mode = "observe"
    status: Literal[
        "proposed", "waiting", "refused", "sent", "applied", "failed", "vetoed", "expired", "unavailable", "reverted"
    ] = "proposed"
    decided_step: int
    applied_step: int | None = None
    reason: str = ""
    readback: Literal["ok", "failed", "pending"] = "pending"
    observed: dict[str, Any] = {}
    outcome: Outcome = "pending"
    settle_until: int | None = None
    steps_replayed: int = 0
    time_unix: float = 0.0
    expires_step: int | None = None
    """Of an action that waits for a person: the step at which the policy's default takes the person's place."""
    answered_by: str = ""
    """The person who approved or refused it."""


class DetectorState(Record, frozen=True, kw_only=True, tag="detectors"):
    """What a run's detectors knew after a step, so that another process goes on from there; the newest replaces all."""

    run: str
    attempt: int
    step: int
    seen: int
    """Steps observed in all, repeated ones included."""
    quiet_until_seen: int
    prefix: str
    """What ids of findings and incidents begin with."""
    data: bytes
    """`fp8watch.detect.pipeline.Pipeline.dump`."""


class RunRecord(Record, frozen=True, kw_only=True, tag="run"):
    """A run as the store lists it; replaced at every change of state."""

    run: str
    state: Literal["running", "ended", "lost", "halted"]
    hello: Hello
    started_unix: float
    updated_unix: float
    last_step: int = 0
    reason: str = ""


Message = Hello | Layout | StepFrame | CheckpointRecord | CommandResult | Evaluation | Goodbye
"""What a rank sends."""

Uplink = Message | NodeFrame | RankLost
"""What an agent sends to the controller of a cluster."""

Reply = Welcome | Command | LedgerUpdate | Inquiry
"""What a rank receives."""

Stored = (
    RunRecord | Layout | StepFrame | Finding | ActionRecord | CheckpointRecord | CommandResult | Evaluation
    | TraceEntry | Arrival | DetectorState
)  # fmt: skip
"""What a store keeps."""
