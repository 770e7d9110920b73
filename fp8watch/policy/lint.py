"""What is wrong with a policy that is valid: rules that can never take effect, or that work against each other.

`fp8watch policy check` refuses such a file. A run that is given one starts anyway and does what is left of it: it must
not fail to start over a rule that never fires.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8watch.policy.budgets import FREE
from fp8watch.policy.rungs import (
    AdjustLossScale,
    Bf16Layers,
    CheckpointCadence,
    HoldLr,
    LengthenWarmup,
    RaiseMargin,
    RepairScale,
    Rewarm,
    Rollback,
    Rung,
    SkipUpdate,
    TightenClip,
)
from fp8watch.policy.schema import MODE_RANK, Policy, Rule, When
from fp8watch.records import Mode

Location = tuple[str | int, ...]
Fault = tuple[Location, str]
"""Place in the file, and reason."""

WHOLE_RUN = frozenset({"loss_spike", "divergence", "stuck", "update_rms", "clip_rate", "no_progress", "blind"})
"""Detectors whose findings name neither tensor nor layer."""


def faults(policy: Policy) -> list[Fault]:
    """All faults, in the order of the file."""
    found = [*_budgets(policy)]
    for number, rule in enumerate(policy.rules):
        at: Location = ("rules", number)
        found += _never_matches(rule, at)
        found += _shadowed(policy, number)
        found += _looser(policy, rule, at)
        if policy.rule_mode(rule) != "observe":
            found += [fault for index in range(len(rule.ladder)) for fault in _rung(policy, rule, index, at)]
            found += _undone(policy, number)
    return found


def _budgets(policy: Policy) -> Iterator[Fault]:
    acting = [(rule.name, rung) for rule in policy.rules for rung in rule.ladder if _acts(policy, rule, rung)]
    budgets = policy.budgets
    paying = [name for name, rung in acting if rung.action not in FREE]
    if budgets.actions_per_1000_steps == 0 and paying and budgets.when_spent == "observe":
        yield ("budgets", "actions_per_1000_steps"), f"0 actions, and rule {paying[0]} wants to act"
    for key in ("rollbacks_per_24h", "rollbacks_per_checkpoint"):
        going_back = [name for name, rung in acting if isinstance(rung, Rollback)]
        if getattr(budgets, key) == 0 and going_back:
            yield ("budgets", key), f"0 rollbacks, and rule {going_back[0]} wants to go back"


def _never_matches(rule: Rule, at: Location) -> Iterator[Fault]:
    when = rule.when
    if set(when.detector) <= WHOLE_RUN:
        names = ", ".join(when.detector)
        if when.tensor is not None:
            yield (*at, "when", "tensor"), f"never holds: findings of {names} name no tensor"
        if when.layers is not None:
            yield (*at, "when", "layers"), f"never holds: findings of {names} name no layer"
        if when.scope is not None and not set(when.scope) & {"run", "rank"}:
            yield (*at, "when", "scope"), f"never holds: findings of {names} concern the whole run"
    if when.params_nonfinite and "nonfinite" not in when.detector:
        yield (*at, "when", "params_nonfinite"), "never holds: only findings of nonfinite come with such parameters"


def _shadowed(policy: Policy, number: int) -> Iterator[Fault]:
    rule = policy.rules[number]
    for earlier in policy.rules[:number]:
        if _covers(earlier.when, rule.when):
            reason = f"is never reached: rule {earlier.name} above has all that this one asks for"
            yield ("rules", number, "name"), reason
            return


def _covers(wide: When, narrow: When) -> bool:
    """Whether `wide` matches everything that `narrow` matches."""
    conditions = (
        set(narrow.detector) <= set(wide.detector),
        wide.severity == "warn" or narrow.severity == "act",
        _within(narrow.cause, wide.cause),
        _within(narrow.tensor, wide.tensor),
        _within(narrow.scope, wide.scope),
        _within(narrow.layers, wide.layers),
        wide.for_steps <= narrow.for_steps,
        wide.near_warmup_steps is None
        or (narrow.near_warmup_steps is not None and narrow.near_warmup_steps <= wide.near_warmup_steps),
        wide.params_nonfinite is None or wide.params_nonfinite == narrow.params_nonfinite,
    )
    return all(conditions)


def _within(narrow: tuple[str, ...] | None, wide: tuple[str, ...] | None) -> bool:
    return wide is None or (narrow is not None and set(narrow) <= set(wide))


def _acts(policy: Policy, rule: Rule, rung: Rung) -> bool:
    return policy.rung_mode(rule, rung) != "observe"


def _looser(policy: Policy, rule: Rule, at: Location) -> Iterator[Fault]:
    """Modes that promise more than the file or the rule allows. `approve` below `observe` is none: it is what will hold
    once the file or rule acts."""
    if rule.mode is not None and _promises_more(rule.mode, policy.mode):
        yield (*at, "mode"), f"{rule.mode} is looser than the file's {policy.mode}, which stands"
    allowed = policy.rule_mode(rule)
    for index, rung in enumerate(rule.ladder):
        if rung.mode is not None and _promises_more(rung.mode, allowed):
            whose = "file" if allowed == policy.mode else "rule"
            yield (*at, "ladder", index, "mode"), f"{rung.mode} is looser than the {whose}'s {allowed}, which stands"


def _promises_more(mode: Mode, allowed: Mode) -> bool:
    return MODE_RANK[mode] > MODE_RANK[allowed] and (mode, allowed) != ("approve", "observe")


def _rung(policy: Policy, rule: Rule, index: int, at: Location) -> Iterator[Fault]:
    rung = rule.ladder[index]
    here: Location = (*at, "ladder", index)
    before = next((item for item in reversed(rule.ladder[:index]) if _acts(policy, rule, item)), None)
    if before is not None and before.action == "halt":
        yield here, "is never reached: the rung before stops the run"
    if not _acts(policy, rule, rung):
        return
    is_same = before is not None and rung == before.model_copy(update={"mode": rung.mode})
    if is_same and rung.if_loss_above is None and not isinstance(rung, Rollback):
        yield here, "is the rung before once more: what had no effect is not tried again"
    why = _impossible(policy, rule, rung)
    if why is not None:
        yield here, f"{rung.action} can never be done here: {why}"
    if before is None and rung.if_loss_above is not None:
        yield (*here, "if_loss_above"), "has no meaning on the first rung: no rung before it has helped"


def _impossible(policy: Policy, rule: Rule, rung: Rung) -> str | None:
    when, requires = rule.when, rung.requires
    detectors = set(when.detector)
    if isinstance(rung, SkipUpdate):
        if "nonfinite" not in detectors:
            return "only a non-finite gradient is skipped, and the rule is not for nonfinite"
        if when.params_nonfinite:
            return "parameters that are not finite are not mended by skipping an update"
        if rung.max_consecutive == 0:
            return "max_consecutive is 0"
        if policy.rung_mode(rule, rung) == "approve":
            return "the ranks carry it out on the spot and cannot wait for a person"
    if isinstance(rung, TightenClip) and detectors == {"nonfinite"}:
        return "clipping cannot mend a norm that is not finite"
    if isinstance(rung, LengthenWarmup) and requires.in_warmup is False:
        return "it needs a warm-up that is under way, and requires says in_warmup: false"
    if isinstance(rung, RaiseMargin) and detectors == {"underflow"}:
        return "more head-room makes underflow worse"
    names_layers = bool(detectors - WHOLE_RUN) and when.scope != ("run",)
    if isinstance(rung, Bf16Layers) and not names_layers:
        return f"findings of {', '.join(when.detector)} name no layer"
    if isinstance(rung, RepairScale) and rung.scope != "run" and not names_layers:
        return f"findings of {', '.join(when.detector)} name no tensor (scope: run mends all)"
    if requires.max_layers is not None and isinstance(rung, Bf16Layers) and not names_layers:
        return "no layers are named"
    return None


def _undone(policy: Policy, number: int) -> Iterator[Fault]:
    """Rules that pull the same thing in two directions, for troubles that can occur together."""
    rule = policy.rules[number]
    for index, rung in enumerate(rule.ladder):
        for other in policy.rules[: number + 1]:
            if not _may_meet(rule, other):
                continue
            until = index if other is rule else len(other.ladder)
            acting = [item for item in other.ladder[:until] if _acts(policy, other, item)]
            if _acts(policy, rule, rung) and any(_opposes(rung, item) for item in acting):
                what = _direction(rung)
                assert what is not None
                reason = f"undoes what rule {other.name} does: one raises, the other lowers the {what[0]}"
                yield ("rules", number, "ladder", index), reason
                return


def _may_meet(first: Rule, second: Rule) -> bool:
    """Whether both rules may answer the same trouble, one now and one later."""
    causes = (
        first.when.cause is None or second.when.cause is None or bool(set(first.when.cause) & set(second.when.cause))
    )
    return first is second or (causes and bool(set(first.when.detector) & set(second.when.detector)))


def _opposes(first: Rung, second: Rung) -> bool:
    one, other = _direction(first), _direction(second)
    return one is not None and other is not None and one[0] == other[0] and one[1] * other[1] < 0


def _direction(rung: Rung) -> tuple[str, float] | None:
    """What a rung changes, and in which direction (the sign)."""
    if isinstance(rung, AdjustLossScale):
        return "loss scale", rung.factor - 1.0
    if isinstance(rung, RaiseMargin):
        return "margin", rung.bits
    if isinstance(rung, CheckpointCadence):
        return "checkpoint cadence", 1.0
    if isinstance(rung, HoldLr | Rewarm | LengthenWarmup):
        return "learning rate", -1.0
    if isinstance(rung, TightenClip):
        return "clip limit", -1.0
    return None
