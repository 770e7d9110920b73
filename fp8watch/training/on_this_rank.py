"""One command on this rank alone: what it came to, and how it is taken back when another rank could not do it.

Failures are returned, because the other ranks wait for the outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fp8watch.actions.base import Action, Applied
from fp8watch.actions.undo import take_back
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import ActionError, CheckpointError, PartlyChanged
from fp8watch.records import Command
from fp8watch.training.agreement.base import JointOutcome, MustStop, RankOutcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """Outcome of a command on this rank."""

    outcome: RankOutcome
    applied: Applied | None = None
    """For a revert: the action that was reverted."""
    detail: str = ""
    is_begun: bool = True
    broken: str | None = None
    """Why the state must neither be trained on nor saved; None: it may be."""


def carry_out(command: Command, action: Action, step: int, applied: Mapping[str, Applied]) -> LocalResult:
    """Apply or revert an action. `applied`: what was applied before, by command id. Raises `MustStop`."""
    try:
        if command.verb == "revert":
            return LocalResult(outcome=RankOutcome.DONE, applied=_revert(command, action, applied))
        return LocalResult(outcome=RankOutcome.DONE, applied=action.apply(step, dict(command.params)))
    except MustStop:
        raise
    except PartlyRestored as error:
        return LocalResult(outcome=RankOutcome.UNKNOWN, detail=str(error), broken=f"{command.action}: {error}")
    except PartlyChanged as error:
        return LocalResult(outcome=RankOutcome.UNKNOWN, detail=str(error))
    except (ActionError, CheckpointError) as error:
        return LocalResult(outcome=RankOutcome.FAILED, detail=str(error))
    except Exception as error:
        logger.warning("fp8watch: %s failed", command.action, exc_info=error)
        return LocalResult(outcome=RankOutcome.UNKNOWN, detail=f"{type(error).__name__}: {error}")


def take_back_here(action: Action, applied: Applied, joint: JointOutcome) -> JointOutcome:
    """Take back what another rank could not carry out."""
    try:
        take_back(action, applied)
    except Exception as error:
        return JointOutcome("stop", f"{joint.detail}, and it cannot be taken back here: {error}")
    return JointOutcome("undo", f"{joint.detail}; taken back on all ranks")


def _revert(command: Command, action: Action, known: Mapping[str, Applied]) -> Applied:
    """Revert the application that a command names, and return it. Raises `ActionError`."""
    # A partial revert (of some layers) is a command with its own id; `of` names the command that it reverts.
    target = str(command.params.get("of", command.id))
    applied = known.get(target)
    if applied is None:
        raise ActionError(f"{target} was not applied by this process, so it cannot be undone here")
    if "layers" in command.params:
        applied = replace(applied, params={**applied.params, "layers": command.params["layers"]})
    action.revert(applied)
    return applied
