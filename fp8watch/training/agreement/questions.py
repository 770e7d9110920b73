"""The questions by which ranks agree on a target, kept in step over all ranks whatever fails on one.

All ranks ask the same questions in the same order, and each waits for the answers of all. A rank that stops asking
because of an error would leave the others waiting, and would then answer another question than they ask. So the series
of questions is followed here: `end` answers for a rank that cannot go on.
"""

from __future__ import annotations

import logging

from fp8watch.actions.base import Action
from fp8watch.actions.joint import Answer, Choosing
from fp8watch.errors import ActionError, CheckpointError
from fp8watch.records import Command
from fp8watch.training.agreement.base import Agreement, MustStop

logger = logging.getLogger(__name__)


class Questions:
    """One series of questions (see `fp8watch.actions.joint`); an `Ask` for the action that chooses."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._is_first = True
        self.is_open = True
        """Whether the other ranks wait for another answer."""
        self.is_agreed = False
        """Whether all ranks have agreed on a target."""

    def __call__(self, answer: Answer, about: str) -> Answer:
        """See `Ask`. Raises `MustStop` when the other ranks' answers are not known."""
        try:
            joint = Answer(self._agreement.lowest(answer, about))
        except MustStop:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._agreement.abandon(reason)
            raise MustStop(
                f"it is unknown whether the other ranks go on with this action ({about}): {reason}"
            ) from error
        self.is_open = joint is (Answer.YES if self._is_first else Answer.DAMAGED)
        self.is_agreed = joint is Answer.YES and not self._is_first
        self._is_first = False
        return joint

    def end(self) -> None:
        """Answer that this rank cannot, if the other ranks wait for an answer: then none of them goes on."""
        if self.is_open:
            self(Answer.CANNOT, "begin" if self._is_first else "none")


def agree_on_target(agreement: Agreement, action: Action | None, command: Command, step: int, cannot: str) -> str:
    """Agree with the other ranks on a target, with nothing changed yet. Returns why there is none, or "".

    `cannot`: why this rank cannot act, or "". Nothing has been changed, so an error of any kind only cancels the
    command, on all ranks. Raises `MustStop` when the other ranks' answers are lost, and when this rank fails after all
    have agreed: then the others overwrite their state, and ask questions that this rank would not ask.
    """
    questions = Questions(agreement)
    if not cannot:
        cannot = _choose(action, command, step, questions)
    if cannot and questions.is_agreed and agreement.is_joint:
        agreement.abandon(cannot)
        raise MustStop(f"the other ranks carry it out, and this one cannot: {cannot}")
    if cannot:
        questions.end()
    return cannot


def _choose(action: Action | None, command: Command, step: int, questions: Questions) -> str:
    if not isinstance(action, Choosing):
        return f"{command.action} chooses no target"
    try:
        action.choose(step, dict(command.params), questions)
    except MustStop:
        raise
    except (ActionError, CheckpointError) as error:
        return str(error)
    except Exception as error:
        logger.warning("fp8watch: %s found no target", command.action, exc_info=error)
        return f"nothing was done: {type(error).__name__}: {error}"
    return "" if questions.is_agreed else "no target was agreed on"
