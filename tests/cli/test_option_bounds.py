"""No option of any command accepts a number that makes no sense, and an empty path is not the current folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.models import ArgumentInfo, OptionInfo
from typer.testing import CliRunner, Result

from fp8watch.cli import build
from fp8watch.commands import mounted, values
from fp8watch.errors import BadInput
from fp8watch.settings import Settings, from_environment

PLACES = {"replay": ["x.csv"], "policy compare": ["auto", "observe", "x.csv"]}
"""Command -> arguments that it does not run without."""


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command with its function, including those that are only loaded when called."""

    def below(name: str, app: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
        for group in app.registered_groups:
            assert group.typer_instance is not None
            yield from below(f"{name} {group.name}".strip(), group.typer_instance)
        for command in app.registered_commands:
            assert command.callback is not None
            yield f"{name} {command.name or command.callback.__name__}".strip(), command.callback
        if app.registered_callback is not None and name:
            assert app.registered_callback.callback is not None
            yield name, app.registered_callback.callback

    yield from below("", build())
    loaded = {name: importlib.import_module(module) for name, (module, _) in mounted.OWN.items()}
    loaded |= {entry.name: entry.load() for entry in importlib.metadata.entry_points(group=mounted.GROUP)}
    for name, target in loaded.items():
        app = target if isinstance(target, typer.Typer) else getattr(target, "app", None)
        if app is None:
            yield name, getattr(target, "command", None) or target.demo
        else:
            yield from ((name, function) for _, function in below(name, app))


def numeric() -> dict[str, OptionInfo]:
    """`command --option` of every number that can be given."""
    found: dict[str, OptionInfo] = {}
    for name, function in commands():
        for parameter, hint in typing.get_type_hints(function, include_extras=True).items():
            if typing.get_origin(hint) is not typing.Annotated:
                continue
            kind, *metadata = typing.get_args(hint)
            info = next((item for item in metadata if isinstance(item, OptionInfo | ArgumentInfo)), None)
            if info is None or not {int, float} & {kind, *typing.get_args(kind)}:
                continue
            assert isinstance(info, OptionInfo), name
            option = next((text for text in info.param_decls or () if text.startswith("--")), None)
            found[f"{name} {option or '--' + parameter.replace('_', '-')}"] = info
    return found


NUMERIC = numeric()


def test_every_number_of_every_command_is_looked_at() -> None:
    assert NUMERIC.keys() >= {
        "doctor --expect-agents", "demo --steps", "demo --seed", "demo --fault-step", "replay --checkpoint-every",
        "replay --warmup-steps", "policy compare --checkpoint-every", "policy compare --warmup-steps",
        "controller --metrics-port", "agent --metrics-port", "agent --series-budget", "agent --worst-layers",
        "agent --parent-pid", "agent --end-grace-seconds", "agent --connect-seconds", "console --port",
    }  # fmt: skip


@pytest.mark.parametrize("name", NUMERIC)
def test_what_lies_beyond_the_bounds_is_refused_by_name(name: str) -> None:
    info = NUMERIC[name]
    command, _, option = name.rpartition(" ")
    if info.parser is None:
        assert info.min is not None, "a bound below"
        assert info.max is not None or option == "--parent-pid", "a bound above"
        wrong = [info.min - 1, *([] if info.max is None else [info.max + 1, "9" * 30]), "nan", ""]
    else:
        wrong = [0, -1, "9" * 30, "nan", "inf", ""]
    for value in wrong:
        result = call(*command.split(), *PLACES.get(command, []), option, str(value))
        assert result.exit_code == 2, (value, result.output)
        assert option in result.stderr, value


def call(*arguments: str) -> Result:
    return CliRunner().invoke(build(), list(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["controller", "--log-level", "loud"],
        ["agent", "--connect-seconds", "soon"],
        ["agent", "--log-level", "loud"],
        ["agent", "--dir", ""],
        ["agent", "--redis", ""],
        ["agent", "--socket", ""],
        ["agent", "--node", ""],
        ["controller", "--redis", ""],
        ["controller", "--name", ""],
        ["doctor", "--cluster", "--redis", ""],
        ["doctor", "--cluster", "--agent-socket", ""],
        ["agent", "--embedded", "--run", "", "--socket", "x"],
        ["runs", "list", "--dir", ""],
        ["doctor", "--no-with-torch", "--dir", ""],
        ["incident", "export", "i1", "-o", ""],
        ["console", "--dir", ""],
        ["console", "--tls-cert", ""],
        ["console", "--tls-key", ""],
    ],
)
def test_nonsense_is_bad_input_with_a_message(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert arguments[-2] in result.stderr or "--embedded needs" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["replay"], ["policy", "compare", "auto", "observe"]])
def test_an_empty_path_is_not_the_current_folder(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,3.0\n2,3.0\n")  # what the current folder holds
    result = call(*command, "")
    assert result.exit_code == 2
    assert "command line:1: path: empty; the current folder is '.'" in result.stderr
    assert "2 steps" not in result.stdout
    assert call(*command, ".").exit_code == 0


@pytest.mark.parametrize("command", [["incident", "list"], ["actions", "list"], ["runs", "show"], ["disarm"]])
def test_an_empty_name_is_not_the_newest_run(command: list[str], tmp_path: Path) -> None:
    result = call(*command, "", "--dir", str(tmp_path))
    assert result.exit_code == 3
    assert "no run ''" in result.stderr


@pytest.mark.parametrize("name", ["CONNECT_SECONDS", "END_GRACE_SECONDS"])
def test_a_setting_may_be_what_the_option_may_be(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The training process hands its settings to the agent that it starts as options: one must not refuse the other."""
    for text in ("0.25", "86400", "3e2"):
        monkeypatch.setenv(f"FP8WATCH_{name}", text)
        setting = getattr(from_environment(), name.lower())
        assert values.seconds(str(setting)) == setting
    for text in ("0", "-1", "nan", "inf", "86401", "soon"):
        monkeypatch.setenv(f"FP8WATCH_{name}", text)
        with pytest.raises(Exception, match="FP8WATCH_"):
            from_environment()
        with pytest.raises(typer.BadParameter):
            values.seconds(text)


FRACTIONS = [name for name, field in Settings.model_fields.items() if "float" in str(field.annotation)]


@pytest.mark.parametrize("name", FRACTIONS)
def test_no_setting_is_endless_or_no_number(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for text in ("nan", "inf", "-inf", "-1"):
        monkeypatch.setenv(f"FP8WATCH_{name.upper()}", text)
        with pytest.raises(BadInput, match=f"environment:1: FP8WATCH_{name.upper()}: "):
            from_environment()


def test_settings_with_a_fraction_are_looked_at() -> None:
    assert {"overhead_budget", "join_seconds", "lease_seconds", "redis_keep_seconds"} <= set(FRACTIONS)
