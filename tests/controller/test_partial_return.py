"""One layer of a `bf16_layers` goes back to FP8 through the rank's real boundary, the others stay; then the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.controller.commands import CommandTracker
from fp8watch.records import CommandResult
from fp8watch.settings import Settings
from fp8watch.training.agreement import SingleProcess
from fp8watch.training.boundary import Boundary
from fp8watch.training.disarm import Disarm
from fp8watch.training.journal import Journal


class Layers:
    """Modules held in BF16; gives back those of `params["layers"]`."""

    name = "bf16_layers"

    def __init__(self) -> None:
        self.held: list[str] = []

    def unavailable(self) -> str | None:
        return None

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        self.held += params["layers"]
        return Applied(step=step, params=params)

    def read_back(self, applied: Applied) -> ReadBack:
        return ReadBack(ok=True)

    def revert(self, applied: Applied) -> None:
        assert set(applied.params["layers"]) <= set(self.held), "what is not held cannot be given back"
        self.held = [layer for layer in self.held if layer not in applied.params["layers"]]

    def read_back_revert(self, applied: Applied) -> ReadBack:
        return ReadBack(ok=not set(applied.params["layers"]) & set(self.held))


def test_layers_go_back_one_at_a_time(tmp_path: Path) -> None:
    layers, answers = Layers(), list[CommandResult]()
    boundary = Boundary(
        rank=0, actions={layers.name: layers}, capabilities=lambda: {layers.name: ""},
        journal=Journal(tmp_path, 0), agreement=SingleProcess(), disarm=Disarm(Settings(dir=tmp_path), "r"),
        mode="auto", send=answers.append, attempt=lambda: 0, start="this start", on_broken=lambda reason: None,
    )  # fmt: skip
    desk = CommandTracker("r", term=1)
    everywhere = frozenset({0})

    def carry_out(verb: Any, params: dict[str, Any], step: int) -> str:
        boundary.receive(
            desk.issue(
                "a1", verb, "bf16_layers", params, step=step, seen=step, attempt=0, ranks=everywhere,
                start="this start",
            )
        )  # fmt: skip
        boundary.run(step)
        for answer in answers:
            desk.take(answer)
        answers.clear()
        conclusion = desk.conclude(step, everywhere)
        assert conclusion is not None
        assert conclusion.action_id == "a1"
        return conclusion.result

    assert carry_out("apply", {"layers": ["a", "b", "c"]}, 1) == "applied"
    assert carry_out("revert", {"of": "a1", "layers": ["c"]}, 2) == "applied"
    assert layers.held == ["a", "b"]
    assert carry_out("revert", {"of": "a1", "layers": ["b"]}, 3) == "applied"
    assert layers.held == ["a"]
    assert carry_out("revert", {"layers": ["a"]}, 4) == "applied"
    assert layers.held == []
