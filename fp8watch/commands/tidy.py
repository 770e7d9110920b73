"""Help texts without noise: a flag takes no value, so that no type is shown after it."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TidyGroup(TyperGroup):
    """A group whose help, and that of all its commands, shows no type after flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its own options."""
        return _tidied(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of its commands."""
        return tidy(super().get_command(ctx, cmd_name))


def tidy(command: Any) -> Any:
    """A command, or a group with all of its commands, with such a help; None stays None."""
    if command is None or isinstance(command, TidyGroup) or hasattr(command, "is_tidy"):
        return command
    command.is_tidy = True
    get_params = command.get_params
    command.get_params = lambda ctx: _tidied(get_params(ctx))
    for item in getattr(command, "commands", {}).values():
        tidy(item)
    return command


def _tidied(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
