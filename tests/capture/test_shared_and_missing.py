"""Modules in several places of a model are named, and so are trained parameters that never get a gradient."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from kept_transport import keep_messages
from torch import nn

import fp8watch.training.attachment as attachment
from fp8watch.capture.aliases import aliases
from fp8watch.capture.missing_gradients import LOOK_EVERY, PATIENCE, MissingGradients
from fp8watch.commands.coverage import Coverage
from fp8watch.emulation import convert
from fp8watch.records import Layout
from fp8watch.settings import Settings


class Shared(nn.Module):
    """A tied head, a layer in two places, a block in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.again, self.later = self.body, nn.ModuleList([self.body, self.block])
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.again(self.body(x))))


def test_every_place_is_named_once() -> None:  # case: HOK-05, HOK-21
    assert aliases(Shared()) == {
        "body": ["again", "later.0"],
        "block": ["later.1"],  # and not block.0 as later.1.0, nor their weights
        "embed.weight": ["head.weight"],
    }
    assert aliases(nn.Linear(2, 2)) == {}
    ring = nn.Linear(2, 2)
    ring.alias = nn.ParameterList([ring.weight])
    assert aliases(ring) == {"weight": ["alias.0"]}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_messages(monkeypatch)
    model = Shared()
    convert(model)
    model.unused = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = attachment.attach(model, optimizer, settings=Settings(report=False))
    yield watch, model, optimizer
    watch.detach()


def test_shared_parts_travel_with_the_layout_and_lost_gradients_are_warned_of_once(watched, caplog):
    # case: HOK-05, HOK-21, HOK-24
    watch, model, optimizer = watched
    model.embed.weight.requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        for step in range(PATIENCE + 30):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
            if step == PATIENCE - 1:
                assert "unused" not in caplog.text
    assert watch.failures == {}
    assert caplog.text.count("unused.weight, unused.bias") == 1
    (entry,) = [entry for entry in watch.not_observable if "gradient of unused" in entry]
    assert f"none in {PATIENCE} updates" in entry
    assert not any("embed" in entry for entry in watch.not_observable), "frozen: none is expected"
    layout = [m for m in watch._session.uplink._channel.messages if isinstance(m, Layout)][-1]
    assert layout.aliases["body"] == ["again", "later.0"]
    assert layout.aliases["embed.weight"] == ["head.weight"]
    shown = Coverage(observed=3, expected=3, missing=[], aliases=layout.aliases).text()
    assert "body is also again, later.0; block is also later.1; embed.weight is also head.weight" in shown


def test_an_update_without_gradients_is_said_and_not_silent(watched):  # case: HOK-17, HOK-24
    watch, _, optimizer = watched
    optimizer.step()
    watch.step(1.0)
    assert "grad_norm: the optimizer made an update without any gradient" in watch.not_observable
    assert watch.failures == {}


def run(watch: MissingGradients, parameters: list[nn.Parameter], updates: int, *, without: set[int]) -> list[str]:
    """Names found in so many updates, in which all trained parameters but these have gradients."""
    found = []
    for _ in range(updates):
        for i, parameter in enumerate(parameters):
            has_one = parameter.requires_grad and i not in without
            parameter.grad = torch.zeros_like(parameter) if has_one else None
        watch.count()
        found += watch.look()
    return found


def test_what_is_unfrozen_in_mid_run_is_met_and_what_gets_a_gradient_is_let_go() -> None:  # case: HOK-24
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    optimizer = torch.optim.SGD([*parameters, torch.zeros(2, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["params"][-1].grad = torch.zeros(2)
    watch = MissingGradients(model, optimizer)
    assert run(watch, parameters, PATIENCE, without={2}) == []
    assert run(watch, parameters, 5, without=set()) == [], "an expert that got its first tokens"
    parameters[1].requires_grad_(True)
    assert run(watch, parameters, LOOK_EVERY + PATIENCE, without={1}) == ["1.weight"]
    assert run(watch, parameters, LOOK_EVERY + PATIENCE, without={1}) == [], "once"
    optimizer.param_groups[0]["params"][-1].grad = None
    assert run(watch, parameters, LOOK_EVERY + PATIENCE, without={1}) == ["the optimizer's parameter 4"]


def test_an_update_without_any_gradient_says_nothing_of_single_ones() -> None:
    model = nn.Linear(2, 2)
    watch = MissingGradients(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert run(watch, list(model.parameters()), LOOK_EVERY + 2 * PATIENCE, without={0, 1}) == []
