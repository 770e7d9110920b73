"""Text logs of Megatron-LM, torchtitan and NeMo: one line per logged step, among many others.

Megatron:   ` iteration  10/ 500 | ... | learning rate: 1.5E-04 | lm loss: 1.034E+01 | ... | grad norm: 2.3 |`
torchtitan: `... step: 10  loss:  7.8012  grad_norm:  1.2345  memory: ...` (colour codes are taken off)
NeMo:       `Training epoch 0, iteration 9/99 | lr: 1.4e-05 | global_step: 9 | reduced_train_loss: 10.9 | ...`, and the
            progress bar of earlier versions: `Epoch 0: 9% ... reduced_train_loss=10.90, global_step=9.000, ...]`
Other lines are ignored; a line of this form with a number that does not parse is a bad row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.replay.lines import lines, shown
from fp8watch.replay.readers.names import Rows
from fp8watch.replay.recording import Recording

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MEGATRON_STEP = re.compile(r"(?:^|\s)iteration\s+(\d+)\s*/\s*\d+\s*\|")
_TITAN_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
_NEMO_STEP = re.compile(
    r"\bglobal_step:\s*(\d+)\s*\|[^\n]{0,400}?\breduced_train_loss:"
    r"|\breduced_train_loss=[^\n]{0,200}?\bglobal_step=(\d+)(?:\.0*)?\b"
)
_VALUE = r"([^\s|]+)"
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
MAX_DIGITS = 18
"""Most digits of a step."""
MEGATRON_FIELDS = {
    "loss": re.compile(r"\|\s*(?:lm loss|loss)\s*:\s*" + _VALUE),
    "grad_norm": re.compile(r"\|\s*grad norm\s*:\s*" + _VALUE),
    "learning_rate": re.compile(r"\|\s*learning rate\s*:\s*" + _VALUE),
    "loss_scale": re.compile(r"\|\s*loss scale\s*:\s*" + _VALUE),
    "nan_iterations": re.compile(r"\|\s*number of nan iterations\s*:\s*" + _VALUE),
}
TITAN_FIELDS = {
    "loss": re.compile(r"\bloss:\s*" + _VALUE),
    "grad_norm": re.compile(r"\bgrad_norm:\s*" + _VALUE),
    "learning_rate": re.compile(r"\blr:\s*" + _VALUE),
}
NEMO_FIELDS = {
    "loss": re.compile(r"\breduced_train_loss[:=]\s*" + _VALUE),
    "grad_norm": re.compile(r"\bgrad_norm[:=]\s*" + _VALUE),
    "learning_rate": re.compile(r"\blr[:=]\s*" + _VALUE),
}
WHY_NONE = {"megatron": "Megatron prints none when every iteration since the last line was skipped, or was NaN"}
"""Why a line may have no loss (Megatron-LM `training_log` leaves out a mean that is not above 0)."""
_FORMATS = {
    "nemo": (_NEMO_STEP, NEMO_FIELDS),  # before Megatron, because its lines name iterations too
    "megatron": (_MEGATRON_STEP, MEGATRON_FIELDS),
    "torchtitan": (_TITAN_STEP, TITAN_FIELDS),
}


def recognise(text: str) -> str | None:
    """`megatron`, `torchtitan` or `nemo` if the text has a line of that kind, else None."""
    plain = _COLOUR.sub("", text)
    return next((kind for kind, (step_of, _) in _FORMATS.items() if step_of.search(plain)), None)


def read(path: Path, kind: str) -> Recording:
    """The run in a log of this kind."""
    notes: list[str] = []
    return Recording(run=path.stem, source=kind, samples=_samples(path, kind, notes), notes=notes)


def _samples(path: Path, kind: str, notes: list[str]) -> Iterator[Sample]:
    step_of, fields = _FORMATS[kind]
    joined = Rows(path, notes, "the line names none", WHY_NONE.get(kind, ""))
    try:
        for number, raw in enumerate(lines(path), start=1):
            line = _COLOUR.sub("", raw)
            match = step_of.search(line)
            if match is None:
                continue
            scalars: dict[str, float] = {}
            problems = []
            digits = next(group for group in match.groups() if group is not None)
            if len(digits) > MAX_DIGITS:
                problems.append(f"{path}:{number}: step: a number of {len(digits)} digits")
            for name, pattern in fields.items():
                found = pattern.search(line)
                if found is None:
                    continue
                text = found.group(1).rstrip(",]")
                try:
                    scalars[name] = float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
                except ValueError:
                    problems.append(f"{path}:{number}: {name}: '{shown(text)}' is not a number")
            if problems:
                raise BadInput(problems)
            if scalars.pop("nan_iterations", 0.0) > 0:
                # Megatron leaves NaN iterations out of the mean it prints; the count is the only trace.
                scalars["loss"] = float("nan")
            yield from joined.row(int(digits), scalars, f"{path}:{number}", is_empty="loss" not in scalars)
    except BadInput:
        yield from joined.cut_off()
        raise
    yield from joined.finish()
