"""When scales are updated: once a forward and once a backward, whatever calls what."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from emulated_models import CountingTap, Stack, batch, histories, make_stack, scales
from torch import nn

from fp8watch.emulation import DelayedScaling, autocast, convert
from fp8watch.emulation.taps import add_tap, remove_tap

RECOMPUTE = pytest.mark.parametrize("recompute", ["reentrant", "plain"])


@pytest.fixture
def tap() -> Iterator[CountingTap]:
    counting = CountingTap()
    add_tap(counting)
    yield counting
    remove_tap(counting)


def train(model: nn.Module, steps: int, start: int = 0) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Losses, forward scales and backward scales after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, forward, backward = [], [], []
    for step in range(start, start + steps):
        x = batch(step, scale=1.5**step).requires_grad_()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        forward.append(scales(model, forward=True))
        backward.append(scales(model, forward=False))
    return losses, forward, backward


@RECOMPUTE
def test_recomputation_changes_nothing(recompute: str) -> None:
    # case: NUM-04
    plain, checkpointed = make_stack(), make_stack(recompute)
    expected, got = train(plain, 6), train(checkpointed, 6)
    assert got[0] == expected[0]
    for a, b in zip(expected[1] + expected[2], got[1] + got[2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(histories(plain), histories(checkpointed))
    moving = torch.stack(got[2])
    assert ((moving[1:] != moving[:-1]).any(0)).all(), "a backward scale stands still under recomputation"


@RECOMPUTE
def test_one_update_a_direction_under_recomputation(recompute: str, tap: CountingTap) -> None:
    train(make_stack(recompute), 2)
    assert tap.updates == [True, False, True, False]
    assert len(tap.casts) == 2 * 3 * (1 + 3 * 3 + 1)


@RECOMPUTE
def test_two_forwards_in_flight_recompute_with_their_own_scales(recompute: str) -> None:
    gradients = []
    for model in (make_stack(), make_stack(recompute)):
        train(model, 2)
        first = model(batch(7).requires_grad_()).square().mean()
        second = model(batch(8, scale=50.0).requires_grad_()).square().mean()
        first.backward()
        second.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_whole_model_inside_a_reentrant_checkpoint_still_updates(tap: CountingTap) -> None:
    model = make_stack()
    x = batch(0).requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum().backward()
    assert sorted(tap.updates) == [False, True]


def test_every_micro_batch_is_an_update(tap: CountingTap) -> None:
    model = make_stack(amax_compute_algo="most_recent")
    for scale in (1.0, 50.0, 2.0):
        model(batch(0, scale)).sum().backward()
    assert tap.updates == [True, False] * 3
    window = model.first.scaling_forward.amax_history[1:, 0]
    amax = batch(0).abs().max()
    assert torch.allclose(window, amax * torch.tensor([1.0, 50.0, 2.0]))


def test_one_backward_through_two_forwards_is_one_roll() -> None:
    model = make_stack()
    (model(batch(0)).sum() + model(batch(1, 3.0)).sum()).backward()
    assert int((model.head.scaling_backward.amax_history != 0).sum()) == 1
    assert int((model.first.scaling_forward.amax_history[:, 0] != 0).sum()) == 2


def test_two_backwards_through_one_forward_are_two_rolls() -> None:
    model = make_stack()
    y = model(batch(0))
    y.sum().backward(retain_graph=True)
    (2 * y).sum().backward()
    assert int((model.head.scaling_backward.amax_history != 0).sum()) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_neither_rolls_nor_tells(mode: type[torch.no_grad], tap: CountingTap) -> None:
    model = make_stack()
    train(model, 2)
    before, window = scales(model, forward=True), histories(model)[1:]
    told = len(tap.updates), len(tap.casts)
    with mode():
        model(batch(3, 100.0))
    assert torch.equal(scales(model, forward=True), before)
    assert torch.equal(histories(model)[1:], window)
    assert (len(tap.updates), len(tap.casts)) == told
    train(model, 1, start=2)


def test_a_layer_that_does_not_run_keeps_scale_and_history() -> None:
    model = make_stack()
    train(model, 2)
    idle = model.blocks[1].down
    scale, history = idle.scaling_forward.scale.clone(), idle.scaling_forward.amax_history.clone()
    model.blocks[1].forward = lambda x: x  # type: ignore[method-assign]
    train(model, 2, start=2)
    assert torch.equal(idle.scaling_forward.scale, scale)
    assert torch.equal(idle.scaling_forward.amax_history, history)


def test_nested_roots_are_one_forward(tap: CountingTap) -> None:
    recipe, inner = DelayedScaling(), Stack()
    convert(inner, recipe)
    outer = nn.Sequential(nn.Linear(32, 32), inner)
    assert convert(outer, recipe) == ["0"]
    outer(batch(0)).sum().backward()
    assert tap.updates == [True, False]
    inner(batch(0)).sum().backward()
    assert tap.updates == [True, False] * 2


def test_two_models_in_one_process_do_not_touch_each_other() -> None:
    one, other = make_stack(), make_stack()
    train(other, 1)
    before = scales(other, forward=True)
    train(one, 3)
    assert torch.equal(scales(other, forward=True), before)


def test_autocast_makes_one_forward_of_several_calls(tap: CountingTap) -> None:
    model = make_stack()
    with autocast(model):
        y = model.head(model.blocks[0](model.first(batch(0))))
    y.sum().backward()
    assert tap.updates == [True, False]
    model.first(batch(0))
    assert tap.updates == [True, False, True]


@RECOMPUTE
def test_autocast_and_recomputation(recompute: str) -> None:
    results = []
    for checkpointed in (False, True):
        model = make_stack()
        for step in range(3):
            x = batch(step).requires_grad_()
            with autocast(model):
                for block in model.blocks:
                    x = (
                        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=recompute == "reentrant")
                        if checkpointed
                        else block(x)
                    )
            x.square().mean().backward()
        results.append((histories(model), [p.grad for p in model.blocks.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


def test_a_forward_that_raises_updates_nothing_and_leaves_no_region_open(tap: CountingTap) -> None:
    model = make_stack()
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5))
    handle = model.head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))
    handle.remove()
    assert tap.updates == []
    make_stack()(batch(0))
    model(batch(0))
    assert tap.updates == [True, True]


def interrupt(module: nn.Module, args: object) -> None:
    raise KeyboardInterrupt


def test_deep_copies_and_pickles_are_models_of_their_own() -> None:
    model = make_stack()
    train(model, 2)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    revived = torch.load(buffer, weights_only=False)
    before = scales(model, forward=True)
    expected = train(twin, 2, start=2)
    assert torch.equal(scales(model, forward=True), before)
    assert train(revived, 2, start=2)[0] == expected[0]
    assert train(model, 2, start=2)[0] == expected[0]


def test_a_recipe_object_is_shared_within_a_model_only() -> None:
    recipe = DelayedScaling()
    model = Stack()
    convert(model, recipe)
    twin = copy.deepcopy(model)
    assert model.first.recipe is model.head.recipe is recipe  # type: ignore[comparison-overlap]
    assert twin.first.recipe is twin.head.recipe is not recipe  # type: ignore[comparison-overlap]


@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it traces
def test_compiled_autograd_is_refused_aloud_and_leaves_nothing_behind() -> None:
    """Scales of gradients are updated by a callback of the engine, which compiled autograd has none of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    convert(model, DelayedScaling(amax_history_len=1))
    x = torch.randn(4, 16)

    def step() -> None:
        model(x).square().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(Exception, match="queue_callback"):
        torch.compile(step, backend="eager")()
    torch._dynamo.reset()
    before = model[0].scaling_backward.scale.clone()
    model(x).square().sum().backward()
    assert model[0].scaling_backward.scale != before, "without it the same model trains on"
