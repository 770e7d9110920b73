"""Every argument of attach that is not what it should be is named, all of them at once, and nothing is started."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp8watch
from fp8watch.emulation import taps
from fp8watch.errors import BadInput, Refused, WrongArgument
from fp8watch.training.arguments import problems

ARGUMENTS = list(inspect.signature(fp8watch.attach).parameters)
OPTIONAL = ARGUMENTS[2:]
SCHEDULER = torch.optim.lr_scheduler.StepLR


class StepsOnly:
    """A scheduler that cannot be saved."""

    def step(self) -> None:
        return None


def refused(trainer: Any, **arguments: Any) -> list[str]:
    """The problems of an attach that must fail without a trace; without their `file:line: `."""
    arguments = {"model": trainer.model, "optimizer": trainer.optimizer} | arguments
    threads = set(threading.enumerate())
    with pytest.raises(BadInput) as caught:
        fp8watch.attach(**arguments)
    assert isinstance(caught.value, Refused)
    assert set(threading.enumerate()) <= threads
    assert "step" not in vars(trainer.optimizer)
    assert not taps._taps
    return caught.value.problems


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("value", [3, 2.5, True, b"x", torch.nn.Linear, b""])
def test_no_argument_takes_whatever_it_is_given(trainer: Any, name: str, value: Any) -> None:
    (problem,) = refused(trainer, **{name: value})
    where, field, reason = problem.split(": ", 2)
    assert (where.rpartition(":")[0], field) == (__file__, name)
    assert "is wanted" in reason or "are wanted" in reason
    assert "got " in reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lr_scheduler": SCHEDULER}, "got the class StepLR itself"),
        ({"lr_scheduler": lambda step: 1.0}, "got function"),
        ({"dataloader": "train"}, "dataloader: the loader that the loop iterates is wanted, got str 'train'"),
        ({"checkpoints": "ckpt"}, 'fp8watch.Checkpoints("ckpt", every=200) is wanted'),
        ({"policy": {"version": 1}}, "YAML text is wanted, got dict"),
        ({"policy": ["auto"]}, "YAML text is wanted, got list"),
        ({"policy": ""}, "policy: empty"),
        ({"run": "///"}, "run: '///' has no letter or digit"),
        ({"run": Path("a")}, "run: a name (str) is wanted, got PosixPath"),
        ({"settings": {"dir": "x"}}, "settings: fp8watch.settings.Settings(...) is wanted, got dict"),
        ({"forward": lambda batch: batch}, "without arguments"),
        ({"forward": torch.nn.Linear(2, 2)}, "without arguments"),
        ({"scaler": object()}, "a loss scaler such as torch.amp.GradScaler is wanted, got object"),
        ({"mesh": "fsdp"}, "a device mesh or process groups are wanted, got str 'fsdp'"),
        ({"lr_scheduler": StepsOnly(), "checkpoints": fp8watch.Checkpoints("c")}, "StepsOnly has no state_dict()"),
    ],
)
def test_what_is_nearly_right_is_told_apart(trainer: Any, arguments: dict[str, Any], said: str) -> None:
    (problem,) = refused(trainer, **arguments)
    assert said in problem


def test_an_optimizer_in_the_place_of_the_scheduler_is_one_mistake_each(trainer: Any) -> None:
    swapped = refused(trainer, model=trainer.optimizer, optimizer=trainer.model, lr_scheduler=trainer.optimizer)
    assert [problem.split(": ")[1] for problem in swapped] == ["model", "optimizer", "lr_scheduler"]
    assert "got an optimizer (" in swapped[2]


def test_arguments_policy_and_environment_are_named_at_once(trainer: Any, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("FP8WATCH_METRICS_PORT", "99999")
    bad = "version: 1\nmode: loud\nrules: 3\n"
    found = refused(trainer, policy=bad, run=5, lr_scheduler=3)
    assert [problem.split(": ")[1] for problem in found] == [
        "lr_scheduler", "run", "mode", "rules", "FP8WATCH_METRICS_PORT",
    ]  # fmt: skip
    assert capfd.readouterr().err.splitlines() == found, "said to who does not look at the exception"


def test_none_and_what_other_libraries_have_is_taken(trainer: Any, channel: Any) -> None:
    class Scheduler(StepsOnly):
        def state_dict(self) -> dict[str, Any]:
            return {}

    class Loader:
        def __getitem__(self, index: int) -> int:
            raise IndexError

    known: dict[str, Any] = dict.fromkeys(OPTIONAL) | {
        "lr_scheduler": Scheduler(), "dataloader": Loader(), "mesh": object(), "run": "",
        "forward": lambda *, batch=None: batch, "policy": Path("observe.yaml"),
    }  # fmt: skip
    assert problems({"model": trainer.model, "optimizer": trainer.optimizer} | known) == []
    watch = fp8watch.attach(trainer.model, trainer.optimizer, **(known | {"policy": "observe"}))
    assert watch.is_attached


@pytest.mark.parametrize("path", [5, None, "", "  ", ["ckpt"]])
def test_checkpoints_without_a_folder_are_refused_where_they_are_made(path: Any) -> None:
    with pytest.raises(ValueError, match="the folder that checkpoints go into is needed"):
        fp8watch.Checkpoints(path)


def test_it_is_a_type_error_too_and_names_the_line_of_the_call(trainer: Any) -> None:
    with pytest.raises(TypeError) as caught:
        fp8watch.attach(
            trainer.model,
            trainer.optimizer,
            run=5,  # type: ignore[arg-type]
        )
    assert isinstance(caught.value, WrongArgument)
    assert caught.value.code == 2, "what a process ends with that does not catch it"
    line = test_it_is_a_type_error_too_and_names_the_line_of_the_call.__code__.co_firstlineno + 2
    assert caught.value.problems[0].startswith(f"{__file__}:{line}: run: ")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(OPTIONAL),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
)
def test_any_value_is_taken_or_named(name: str, value: Any) -> None:
    model = torch.nn.Linear(2, 2)
    arguments = dict.fromkeys(ARGUMENTS) | {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    found = problems(arguments | {name: value})
    assert len(found) <= 1
    assert all(problem.split(": ")[1] == name for problem in found)
    assert WrongArgument(found).problems == found
