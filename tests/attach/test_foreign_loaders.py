"""Loaders and other handles that raise over being looked at: iterated as they are, and what is not known is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from watched_training import Trainer

import fp8watch
from fp8watch.training.data import Batches

ERRORS = [KeyError("no such field"), RuntimeError("boom"), ValueError(), ZeroDivisionError("x")]


class Proxy:
    """As a proxy of another library may be: what it does not have is an error of its own."""

    def __init__(self, error: Exception, rows: int = 3) -> None:
        self.__dict__.update(_error=error, _rows=rows)

    def __getattr__(self, name: str) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((2,), float(number)) for number in range(self._rows)])


class Half(list[torch.Tensor]):
    """It answers until an epoch is begun."""

    @property
    def sampler(self) -> Any:
        raise RuntimeError("not in this mode")


@pytest.mark.parametrize("error", ERRORS)
def test_batches_come_as_they_are_and_the_position_is_said_not_to_be_known(
    trainer: Trainer, channel: Callable[[], Any], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    seen = [float(batch[0]) for _ in range(2) for batch in watch.batches(Proxy(error))]
    assert seen == [0.0, 1.0, 2.0] * 2
    trainer.steps(watch, 2)
    assert f"not observable: Proxy raises {type(error).__name__}" in caplog.text
    assert "data position" in caplog.text
    assert watch.failures == {}


def test_the_same_given_to_attach(
    trainer: Trainer, channel: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = Proxy(KeyError("no such field"))
    watch = fp8watch.attach(trainer.model, trainer.optimizer, dataloader=loader)
    assert "data position: not observable: Proxy raises KeyError" in caplog.text
    assert len(list(watch.batches(loader))) == 3
    assert watch.failures == {}


def test_one_shot_iterators_given_to_attach_are_said_there(
    trainer: Trainer, channel: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    fp8watch.attach(trainer.model, trainer.optimizer, dataloader=iter([torch.zeros(2)]))
    assert "data position: the loader can be iterated only once" in caplog.text


def test_what_is_noticed_when_an_epoch_begins_is_said_too() -> None:
    batches = Batches(Half([torch.zeros(2)] * 3))
    assert batches.unavailable is None
    assert [len(list(batches)) for _ in range(2)] == [3, 3]
    assert batches.unavailable is not None
    assert batches.remark == f"data position {batches.unavailable}"
    assert "not observable: Half raises RuntimeError: not in this mode" in batches.remark
    with pytest.raises(ValueError, match="not observable"):
        batches.load_state_dict({"epoch": 0, "index": 0, "samples": 0})


def test_errors_of_the_iteration_itself_are_the_loops(trainer: Trainer, channel: Callable[[], Any]) -> None:
    class Broken(Proxy):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.zeros(2)
            raise LookupError("shard 3")

    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    with pytest.raises(LookupError, match="shard 3"):
        list(watch.batches(Broken(KeyError())))
    with pytest.raises(TypeError, match="not iterable"):
        list(watch.batches(5))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lr_scheduler", "scaler", "mesh", "forward"])
def test_other_handles_of_that_kind_are_named_and_raise_nothing_of_theirs(trainer: Trainer, name: str) -> None:
    class Called(Proxy):
        def __call__(self) -> None:
            return None

    handle: Any = (Called if name == "mesh" else Proxy)(KeyError("no such field"))
    with pytest.raises(fp8watch.errors.BadInput, match=f": {name}: "):
        fp8watch.attach(trainer.model, trainer.optimizer, **{name: handle})


def test_a_sampler_that_could_not_be_told_its_epoch_is_known_before_a_rollback_needs_it() -> None:
    class Sampler(torch.utils.data.SequentialSampler):
        epoch = 3

        @property
        def set_epoch(self) -> Any:
            raise KeyError("set_epoch")

    rows = [torch.full((2,), float(number)) for number in range(3)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=None, sampler=Sampler(rows))  # type: ignore[arg-type]
    batches = Batches(loader)
    assert [float(batch[0]) for batch in batches] == [0.0, 1.0, 2.0]
    assert "not observable: DataLoader raises KeyError" in (batches.unavailable or "")
