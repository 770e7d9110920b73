"""The questions by which ranks agree on a target: what goes wrong in one of them never begins the action."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_ranks import back

from fp8watch.actions.joint import Answer, Ask
from fp8watch.training.agreement import SingleProcess
from fp8watch.training.agreement.base import MustStop
from fp8watch.training.agreement.questions import agree_on_target


class OddAgreement(SingleProcess):
    """Its transport fails in a way that it does not foresee."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []

    def lowest(self, answer: int, about: str) -> int:
        raise ValueError("odd")

    def abandon(self, reason: str) -> None:
        self.abandoned.append(reason)


def test_answers_that_are_lost_in_any_way_stop_this_rank():
    agreement = OddAgreement()
    with pytest.raises(MustStop, match="it is unknown whether the other ranks go on with this action"):
        agree_on_target(agreement, Chooses(), back(0), 1, "")
    assert agreement.abandoned == ["ValueError: odd"]


class Chooses:
    """Asks what `answers` says, and returns as if all were well."""

    name = "rollback"

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers or (Answer.YES,)

    def choose(self, step: int, params: dict[str, Any], ask: Ask) -> None:
        for number, answer in enumerate(self.answers):
            ask(answer, str(number) if number else "begin")


@pytest.mark.parametrize(
    ("answers", "cannot"),
    [
        ((Answer.YES, Answer.YES), ""), ((Answer.YES, Answer.DAMAGED, Answer.YES), ""),
        ((Answer.YES,), "no target was agreed on"), ((Answer.YES, Answer.DAMAGED), "no target was agreed on"),
        ((Answer.CANNOT,), "no target was agreed on"),
    ],
)  # fmt: skip
def test_an_action_that_returns_without_a_target_is_not_applied(answers, cannot):
    assert agree_on_target(SingleProcess(), Chooses(*answers), back(0), 1, "") == cannot
