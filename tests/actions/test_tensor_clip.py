"""A limit of its own for each gradient tensor."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import TinyRun

from fp8watch.actions.tensor_clip import MEMORY, YOUNG_UPDATES, TensorClip
from fp8watch.errors import ActionError


def parameters(*norms: float) -> list[torch.Tensor]:
    found = []
    for norm in norms:
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((4,), norm / 2.0)
        found.append(parameter)
    return found


def norms_of(held: list[torch.Tensor]) -> list[float]:
    return [float(p.grad.norm()) for p in held if p.grad is not None]


def test_a_burst_in_one_tensor_is_cut_there_and_nowhere_else() -> None:
    clip, held = TensorClip(1.5), parameters(1.0, 4.0)
    clip.clip(held)
    assert norms_of(held) == [1.0, 4.0]  # nothing is known yet
    for burst in (50.0, 3.0):
        held[0].grad = torch.full((4,), burst / 2.0)
        held[1].grad = torch.full((4,), 4.2 / 2.0)
        clip.clip(held)
        assert norms_of(held) == pytest.approx([1.5, 4.2])
        assert int(clip.num_clipped) == 1  # type: ignore[arg-type]
        assert float(clip.worst) == pytest.approx(1.0)  # type: ignore[arg-type]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), st.floats(1.0, 3.0))
def test_the_limit_is_the_mean_of_what_was_let_through(norms: list[float], ratio: float) -> None:
    """Held against the same arithmetic on plain numbers; a persistent rise is let through in time."""
    clip, (parameter,) = TensorClip(ratio), parameters(1.0)
    mean: float | None = None
    for count, norm in enumerate(norms, 1):
        parameter.grad = torch.full((4,), norm / 2.0)
        clip.clip([parameter])
        wanted = norm if mean is None else min(norm, ratio * mean)
        assert norms_of([parameter]) == pytest.approx([wanted], rel=1e-4)
        if mean is None or count <= YOUNG_UPDATES:
            mean = wanted if mean is None else min(mean, wanted)
        else:
            mean = MEMORY * mean + (1 - MEMORY) * wanted


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_left_alone_and_teaches_nothing(bad: float) -> None:
    clip, held = TensorClip(2.0), parameters(1.0)
    clip.clip(held)
    held[0].grad = torch.tensor([bad, 1.0, 1.0, 1.0])
    clip.clip(held)
    assert held[0].grad[1:].tolist() == [1.0, 1.0, 1.0]
    held[0].grad = torch.full((4,), 10.0)
    clip.clip(held)
    assert norms_of(held) == pytest.approx([2.0])


def test_frozen_empty_and_zero_gradients_and_a_moving_loss_scale() -> None:
    clip, held = TensorClip(2.0), parameters(1.0, 0.0)
    held.append(torch.nn.Parameter(torch.zeros(3)))
    for scale in (1.0, 1024.0, 64.0):
        held[0].grad = torch.full((4,), 0.5 * scale)
        clip.clip(held, torch.tensor(scale))
        assert norms_of(held)[0] == pytest.approx(scale)


def test_applied_read_back_and_reverted() -> None:
    run = TinyRun()
    run.run(5)
    applied = run.apply("tighten_clip", per_tensor=1.05)
    msgspec.msgpack.encode(applied.expected)  # it goes to the controller
    assert run.read_back("tighten_clip", applied).ok is None
    for _ in range(2):
        run.step()
    found = run.read_back("tighten_clip", applied)
    assert found.ok is True
    assert found.observed["largest_over_limit"] <= 1.001
    run.spoil = lambda: next(run.model.parameters()).grad.mul_(1000.0)  # type: ignore[union-attr]
    run.step()
    found = run.read_back("tighten_clip", applied)
    assert found.ok is True
    assert found.observed["clipped_tensors"] >= 1
    with pytest.raises(ActionError, match="already"):
        run.apply("tighten_clip", per_tensor=2.0)
    run.actions["tighten_clip"].revert(applied)
    assert run.read_back("tighten_clip", applied).ok is False
    assert run.context.clip.is_at_rest
    assert not run.context.skip.is_armed


def test_a_silent_no_op_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    run.run(3)
    applied = run.apply("tighten_clip", per_tensor=1.0)
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factors: None)
    for _ in range(4):
        run.spoil = lambda: next(run.model.parameters()).grad.mul_(run.global_step + 2.0)  # type: ignore[union-attr]
        run.step()
    assert run.read_back("tighten_clip", applied).ok is False


def test_an_update_that_is_no_number_is_left_out_meanwhile(tmp_path: Path) -> None:
    run = TinyRun()
    run.run(3)
    run.apply("tighten_clip", per_tensor=1.5)
    run.step()
    before = [p.detach().clone() for p in run.model.parameters()]
    run.spoil = lambda: next(run.model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


@pytest.mark.parametrize("params", [{"per_tensor": 0.5}, {"per_tensor": 2.0, "max_norm": 1.0}, {"per_tensor": "x"}])
def test_parameters_are_checked(params: dict[str, object]) -> None:
    run = TinyRun()
    with pytest.raises(ActionError):
        run.actions["tighten_clip"].apply(1, dict(params))
    assert run.context.clip.tensors is None
