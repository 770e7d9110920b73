"""The records that travel between training rank, agent, controller and store.

All are frozen `msgspec` structs with a tag, so one decoder reads any of them (`fp8watch.wire`), within the limits of
`fp8watch.bounds`. "Not observed" is an absent scalar, an absent column or a cleared validity bit: never 0 and never
NaN. A NaN or infinity in a scalar is an observation.

Who sends what: a rank sends `Hello`, `Layout`, `StepFrame`, `CheckpointRecord`, `CommandResult`, `Evaluation` and
`Goodbye`; it receives `Welcome`, `Command`, `LedgerUpdate` and `Inquiry`. The controller adds `Finding` and
`ActionRecord` to the store.
"""

from __future__ import annotations

from typing import Any, Literal

from fp8watch.bounds import (
    Attempt,
    Count,
    Name,
    Owner,
    Rank,
    Ranks,
    Sequence,
    Start,
    Step,
    Term,
    Unix,
    Updates,
    Whole,
    WorldSize,
)
from fp8watch.journal import Arrival as Arrival
from fp8watch.journal import TraceEntry as TraceEntry
from fp8watch.layout import Column as Column
from fp8watch.layout import Layout as Layout
from fp8watch.layout import Record as Record
from fp8watch.layout import TensorColumn as TensorColumn
from fp8watch.vocabulary import ACTIONS as ACTIONS
from fp8watch.vocabulary import DETECTORS as DETECTORS
from fp8watch.vocabulary import Cause as Cause
from fp8watch.vocabulary import CheckpointLabel as CheckpointLabel
from fp8watch.vocabulary import Mode as Mode
from fp8watch.vocabulary import Outcome as Outcome
from fp8watch.vocabulary import Severity as Severity
from fp8watch.vocabulary import Verb as Verb


class StepFrame(Record, frozen=True, kw_only=True, tag="frame"):
    """One rank, one optimizer step. (run, attempt, rank, step) is unique.

    `scalars` keys: loss (raw, mean of the micro-batches), loss_micro_max and loss_micro_median (over the micro-batches,
    where there are several), grad_norm (before clipping, after unscaling),
    learning_rate, clip_limit, loss_scale, step_seconds, tokens, samples (consumed so far), update_rms,
    update_ratio (RMS of the update over the RMS of the parameters, matrices only),
    update_skipped (1.0 when the optimizer step was skipped), bf16_modules, overhead_seconds,
    lr_factor (ours, 1.0 when unchanged), param_nonfinite (1.0 when a parameter sample is not finite).

    `columns` keys: amax (f4, after reduction, maximum over the step's micro-batches), amax_last (f4, last
    micro-batch; absent: equal to amax), amax_local (f4, like amax but before the reduction across ranks: this rank's
    own; absent: equal to amax), scale (f4, the one used by this step's last cast), high_precision
    (u1, 1: the module ran in BF16 this step), and on sampled steps quantized, saturated, underflowed,
    nonfinite (u8 element counts), mse, snr (f4); for casts with one scale per row or block also blocks, clipped_blocks
    (u8) and scale_spread (f4, log2 of largest over smallest); now and then those of `fp8watch.what_if.COLUMNS`, and
    shadow_error (f4, at the input of a probed module). Scalars and columns of samples: docs/capture.md, "Closer looks".
    """

    run: Name
    attempt: Attempt
    rank: Rank
    step: Step
    """Updates done before this one, plus one: the first optimizer step is 1."""
    layout_id: Sequence
    time_unix: Unix
    scalars: dict[str, float]
    columns: dict[str, Column] = {}
    updates_forward: Updates = 1
    """Scale updates of the forward tensors in this step (one per micro-batch)."""
    updates_backward: Updates = 1
    dropped: dict[str, Count] = {}
    """Messages this rank's transport has dropped since it was attached, by reason; filled in by the channel."""
    arrival: Sequence = 0
    """Its place among everything the controller was told of the run (`Arrival.sequence`); 0: not numbered."""


class NodeFrame(Record, frozen=True, kw_only=True, tag="node"):
    """All local ranks of one node, one optimizer step: what leaves a node in cluster mode.

    Per-tensor columns are reduced over the node's ranks, matched by module name: amax, saturated and other counts as
    in `fp8watch.controller.merge`; the scale is that of the rank nearest to clipping. `amax_rank` (u1) is the index
    into `ranks` of the rank with the largest amax, `amax_low` (f4) the smallest amax of any rank: together with `amax`
    the spread across ranks. Scalars are kept per rank: they are few, and how ranks differ tells a faulty device from a
    numerical fault.
    """

    run: Name
    attempt: Attempt
    node: Name
    rank: Rank
    """Lowest local rank; `layout_id` is one of its layouts."""
    step: Step
    layout_id: Sequence
    time_unix: Unix
    ranks: Ranks
    """Ranks whose frames are included, in ascending order."""
    scalars: list[dict[str, float]]
    """As in `StepFrame`, one for each of `ranks`."""
    columns: dict[str, Column] = {}
    updates_forward: Updates = 1
    updates_backward: Updates = 1
    dropped: dict[str, Count] = {}
    """Messages lost on this node so far, by reason: all ranks and the agent together."""


class RankLost(Record, frozen=True, kw_only=True, tag="lost"):
    """A node's agent reports that a rank left without a goodbye and did not come back."""

    run: Name
    rank: Rank
    node: Name


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank on a connection, and again after a rollback (a new attempt)."""

    wire_version: Count
    run: Name
    attempt: Attempt
    rank: Rank
    local_rank: Rank
    world_size: WorldSize
    pid: Count
    host: str
    time_unix: Unix
    step: Step
    policy: str | None = None
    """Text of the policy file (YAML); None: observe."""
    policy_name: str = "observe"
    capabilities: dict[str, str] = {}
    """Action -> empty when available, else the reason why it is not."""
    warmup_steps: Step | None = None
    """Length of the scheduler's warm-up, where it is known."""
    is_warming_up: bool = False
    """The learning rate has risen since the first step, and the end of the warm-up is not known yet."""
    num_parameters: Count = 0
    framework: dict[str, str] = {}
    """Versions: python, torch, transformer_engine, fp8watch; recipe; device."""
    expected_modules: Count = 0
    observed_modules: Count = 0
    journal_term: Term = 0
    """Highest command term this rank has seen."""
    armed: bool = True
    tensor_group: Ranks = []
    """Ranks that hold parts of the same tensors as this one (tensor parallelism), including this one: they must use the
    same scales. Empty: not declared."""
    start: Start = ""
    """Random name of this start of the training processes, the same on all ranks that act together; a restart has
    another. Empty: the ranks did not meet, so nothing acts, or the sender is of an earlier version."""
    owner: Owner | None = None
    """User id of the rank's process. Its agent writes here what the kernel says, whatever the rank did (None: an agent
    of an earlier version)."""


class Welcome(Record, frozen=True, kw_only=True, tag="welcome"):
    """The agent's answer to a hello."""

    wire_version: Count
    run: Name
    term: Count
    metrics_url: str = ""
    store: str = ""
    warnings: list[str] = []
    """What a person should know: a store that could not be written, a missing package, a question that waits."""


class Command(Record, frozen=True, kw_only=True, tag="command"):
    """One verb of one action, applied by all ranks at the same boundary or by none."""

    id: str
    run: Name
    attempt: Attempt
    term: Count
    sequence: Count
    verb: Verb
    action: str
    params: dict[str, Any] = {}
    last_step: Count
    """No rank begins it after this optimizer step."""
    because: dict[str, Any] = {}
    """What it rests on: `onset_step`, `rank` (if it concerns a single one), `tensors`. Ranks compare it with what they
    have seen themselves (`fp8watch.training.evidence`)."""
    start: Start = ""
    """`Hello.start` of the processes that it is for; those of another start refuse it."""
    nodes: list[Name] = []
    """In a cluster: the nodes that hold the run's ranks; agents of others do not pass it on. Empty: any."""
    signature: bytes = b""


class CommandResult(Record, frozen=True, kw_only=True, tag="result"):
    """What became of a command on a rank."""

    id: str
    run: Name
    attempt: Attempt
    rank: Rank
    verb: Verb
    step: Step
    """Boundary at which it was applied or refused."""
    status: Literal["applied", "failed", "vetoed", "expired", "unavailable", "unknown"]
    readback: Literal["ok", "failed", "pending"] = "pending"
    detail: str = ""
    observed: dict[str, Any] = {}
    """What was read back: effective LR, clip limit, precision, scale."""
    steps_replayed: Count = 0
    start: Start = ""
    """That of the command."""


class LedgerUpdate(Record, frozen=True, kw_only=True, tag="ledger"):
    """The controller's verdict on a checkpoint."""

    run: Name
    checkpoint: str
    label: CheckpointLabel
    reason: str = ""
    issued_ns: Sequence = 0
    """Unix time in nanoseconds at which it was issued, so that an old verdict cannot be replayed."""
    start: Start = ""
    """`Hello.start` of the processes that it is for."""
    nodes: list[Name] = []
    """As in `Command`."""
    signature: bytes = b""


class Inquiry(Record, frozen=True, kw_only=True, tag="inquiry"):
    """The controller asks for a closer look at layers. It changes nothing in training, and no rank answers it."""

    run: Name
    attempt: Attempt
    step: Count
    """Step of the finding that it is about."""
    modules: list[str]


class CheckpointRecord(Record, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint in the ledger."""

    run: Name
    attempt: Attempt
    checkpoint: str
    step: Step
    """Updates done when it was saved."""
    path: str
    """Its folder; empty once rotation has removed it."""
    label: CheckpointLabel
    reason: str = ""
    has_data_position: bool = False
    samples: Count = 0
    """Samples consumed before it."""
    time_unix: Unix = 0.0
    incident_onset: Whole | None = None
    """Onset of the incident for which the controller will not call it good: it was saved inside, or has the onset
    within its healthy steps."""


class Evaluation(Record, frozen=True, kw_only=True, tag="evaluation"):
    """Evaluation scores, recorded by `watch.evaluation`."""

    run: Name
    attempt: Attempt
    step: Step
    scores: dict[str, float]


class Goodbye(Record, frozen=True, kw_only=True, tag="goodbye"):
    """A rank says that it leaves: at its end, after `detach`, a halt or an error."""

    run: Name
    rank: Rank
    step: Step
    reason: str = "end"
    """end, detached, halted, ranks apart, or `error: <exception>`."""
    dropped: dict[str, Count] = {}
    """As in `StepFrame`."""


class Finding(Record, frozen=True, kw_only=True, tag="finding"):
    """Something is wrong with a run: what, since when, where, why, and the evidence for it."""

    id: str
    run: Name
    attempt: Attempt
    step: Whole
    """Step of the alarm."""
    onset_step: Whole
    detector: str
    severity: Severity
    cause: Cause
    tensor: str | None = None
    """`module:tensor` of the worst tensor, where there is one."""
    layer: str | None = None
    """Module of the worst tensor."""
    rank: Rank | None = None
    layers: list[str] = []
    """All modules concerned, worst first."""
    evidence: dict[str, Any] = {}
    incident: str = ""
    """Shared by all findings of one event."""


class ActionRecord(Record, frozen=True, kw_only=True, tag="action"):
    """The life of one action; a later record with the same id replaces an earlier one."""

    id: str
    run: Name
    attempt: Attempt
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
    decided_step: Whole
    applied_step: Whole | None = None
    reason: str = ""
    readback: Literal["ok", "failed", "pending"] = "pending"
    observed: dict[str, Any] = {}
    outcome: Outcome = "pending"
    settle_until: Whole | None = None
    steps_replayed: Whole = 0
    time_unix: Unix = 0.0
    returned: list[str] = []
    """Layers of a `bf16_layers` in force that are back in FP8 already."""
    expires_step: Whole | None = None
    """For an action that waits for a person: the step at which the policy's default replaces the answer."""
    answered_by: str = ""
    """The person who approved or refused it."""
    start: Start = ""
    """`Hello.start` of the processes for which it was decided."""
    also: list[str] = []
    """Other incidents for which the same question was asked, and to which its answer and its effect belong too."""

    @property
    def incidents(self) -> list[str]:
        """All incidents that it is about, the one that it was decided for first."""
        return [self.incident, *self.also]


class DetectorState(Record, frozen=True, kw_only=True, tag="detectors"):
    """State of a run's detectors after a step, from which another process continues; the newest replaces all others."""

    run: Name
    attempt: Attempt
    step: Whole
    seen: Whole
    """Steps observed in all, including repeated ones."""
    quiet_until_seen: Whole
    prefix: str
    """Common start of the ids of findings and incidents."""
    data: bytes
    """`fp8watch.detect.pipeline.Pipeline.dump`."""


class RunRecord(Record, frozen=True, kw_only=True, tag="run"):
    """A run as the store lists it; replaced at every change of its state."""

    run: Name
    state: Literal["running", "ended", "lost", "halted"]
    hello: Hello
    started_unix: Unix
    updated_unix: Unix
    last_step: Count = 0
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
