"""Every exception fp8watch raises on purpose. Only `Halted` may ever leave a training loop."""

from __future__ import annotations

EXIT_BAD_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_HALTED = 78
EXIT_RESTART = 85


class Fp8watchError(Exception):
    """Base of the errors below."""


class BadInput(Fp8watchError):
    """Something that a person wrote is wrong; `problems` lists everything as `file:line: field: reason`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Unreachable(BadInput):
    """What somebody named does not answer; nothing is known to be wrong with it."""


class Refused(BadInput, SystemExit):
    """What `fp8watch.attach` raises for bad input, before anything is started.

    Uncaught, it ends the process as the command line would: exit code 2 and the problems on stderr, without a
    traceback, because the mistake is not in the program. `except BadInput` and `except Exception` catch it.
    """

    def __init__(self, problems: list[str]) -> None:
        BadInput.__init__(self, problems)
        self.code = EXIT_BAD_INPUT


class WrongArgument(Refused, TypeError):
    """`Refused` for an argument of `fp8watch.attach` of the wrong kind: a `TypeError` as well."""


class OutputFailed(Fp8watchError):
    """Output cannot be written: the disk is full, or nobody reads any more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror or error}")
        self.is_unread = isinstance(error, BrokenPipeError)


class WireError(Fp8watchError):
    """A message that is malformed, too large, or of an unknown version."""


class CheckpointError(Fp8watchError):
    """A checkpoint is missing, damaged or refused; nothing has been overwritten."""


class ActionError(Fp8watchError):
    """An action cannot be carried out, for the reason given; nothing has been changed."""


class PartlyChanged(Fp8watchError):
    """An action has failed, and part of what it had changed could not be taken back; the message says which."""


class MissingDependency(Fp8watchError, ImportError):
    """An optional package is needed and missing."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed: install the extra `{extra}` (in a clone: pip install -e '.[{extra}]')"
        )


class Halted(SystemExit):
    """The policy stopped the run: exit code 78 on all ranks, at one step boundary.

    `attach` refuses the run until somebody calls `fp8watch runs release RUN`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_HALTED)
        self.reason = reason

    def __str__(self) -> str:
        return f"fp8watch halted the run: {self.reason}"


class RanksApart(Halted):
    """Other ranks may have carried out a command that this one has not, and can no longer be asked.

    Exit code 85: restart all ranks together. Unlike after a halt, nobody has to release the run.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = EXIT_RESTART

    def __str__(self) -> str:
        return f"fp8watch stopped this rank: {self.reason}"
