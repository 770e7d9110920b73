"""What a training rank notices when a part of the cluster fails, and what is lost: real processes, one fault a run.

    python bench/faults.py [--only NAME ...] [--again] [--window 5] [--out FILE]

A real trainer that does not pause (`bench/fault_trainer.py`), a real agent, Redis, a controller and its standby. The
fault (`bench/fault_list.py`) is off, on and off again for `--window` seconds each, twice where it can be had twice.
Kept of each: the time inside `watch.step` on the training thread, in wall, own and CPU time (own: without waiting for a
core, so that other work on the machine does not count); a step's own time while the fault is on over that while it is
not, with its 95 % interval; the frames missing in the end; the metric and the log line that say what happened; how
long after the fault's end the controller had judged steps that were made after it, if it came to judge all. Faults
of network, disk and clock need root or libfaketime, and are left out with the reason where they cannot be had.

`--again`: only those of the file that could not be measured for the machine's other work, or missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fault_figures import BARS, figures, judge
from fault_list import FAULTS, Fault
from fault_scenes import Scene, endpoint, parts, scene, start_trainer
from result_head import as_text, head, redis_version

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import StepFrame

RECOVERY_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--window", type=float, default=5.0, help="seconds that a fault is on, and off")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    parser.add_argument("--again", action="store_true")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was mounted and made is taken away again
    known: dict[str, dict[str, Any]] = {}
    if chosen.out.exists() and (chosen.again or len(chosen.only) < len(FAULTS)):
        known = {row["name"]: row for row in json.loads(chosen.out.read_text())["rows"]}
    judge_all(known)
    for name in chosen.only:
        if chosen.again and known.get(name, {}).get("pass"):
            continue
        if problem := FAULTS[name].why_not():
            print(f"{name}: left out: {problem}", file=sys.stderr, flush=True)
            known[name] = {"name": name, "left_out": problem, "misses": [], "pass": True}
        else:
            known[name] = measured(name, chosen.window)
        judge_all(known)
        print(json.dumps(known[name]), flush=True)
        report = head(redis=redis_version()) | {"bars": BARS, "rows": [known[key] for key in FAULTS if key in known]}
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(as_text(report))
    return 1 if any(row["pass"] is False for row in known.values()) else 0


def measured(name: str, window: float) -> dict[str, Any]:
    """One fault's row, not judged yet."""
    fault = FAULTS[name]
    folder = Path(tempfile.mkdtemp(prefix="fp8wf"))
    try:
        with scene(fault.scene, folder) as made:
            return {"name": name, **head_of_run(), **run(made, fault, window)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def head_of_run() -> dict[str, Any]:
    """Load of the machine as the run begins."""
    return {"load": head()["machine"]["load"]}


def run(made: Scene, fault: Fault, window: float) -> dict[str, Any]:
    trainer = start_trainer(made, fault.trainer)
    progress = made.result.with_suffix(".step")
    on: list[tuple[float, float]] = []
    shown: dict[str, float] = {}
    try:
        parts.wait_for(progress.exists, 120, "the first step")
        parts.wait_for(lambda: steps_kept(made) > 0, 60, "frames")
        for _ in range(fault.repeats):
            idle(trainer, window)
            began = time.monotonic()
            acting = threading.Thread(target=fault.begin, args=(made,))
            acting.start()
            idle(trainer, max(window, fault.least_seconds))
            shown |= seen(made, fault) if fault.metric == "up" else {}
            acting.join()
            on.append((began, time.monotonic()))
            fault.end(made)
        recovered = until_judged(made, step_of(progress) + 50, time.monotonic())
        idle(trainer, window)
        shown |= seen(made, fault)
        made.result.with_suffix(".stop").touch()
        code = trainer.wait(60)
    finally:
        if trainer.poll() is None:
            trainer.kill()
            trainer.wait()
    written = json.loads(made.result.read_text()) if made.result.exists() else {"rows": []}
    steps = len(written["rows"])
    if until_judged(made, steps, time.monotonic()) is None:
        recovered = None
    text = made.logs
    # In the scene's own folder there are no names worth keeping.
    lines = [line.replace(str(made.folder), "") for line in text.splitlines() if fault.line and fault.line in line]
    return {
        "exit_code": code, **(figures(written["rows"], on) if steps else {}),
        "own_is_known": written.get("own_is_known"), "nonfinite_values_a_step": written.get("nonfinite", 0),
        "on_seconds": [round(end - begin, 2) for begin, end in on], "frames_missing": steps - steps_kept(made),
        "frames_that_may_be_lost": fault.may_lose, "recovered_seconds": recovered, "metric": shown,
        "line": lines[0][-220:] if lines else "", "wants_metric": bool(fault.metric), "wants_line": bool(fault.line),
        "errors": text.count("Traceback"), "first_error": first_error(text),
    }  # fmt: skip


def first_error(text: str) -> str:
    """The end of the first traceback in the logs."""
    _, found, rest = text.partition("Traceback")
    lines = [line for line in rest.splitlines() if line and not line.startswith((" ", " ("))] if found else []
    return "".join(lines[1:2])[:200]


def idle(trainer: subprocess.Popen[bytes], seconds: float) -> None:
    """Let it train; at once at its end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and trainer.poll() is None:
        time.sleep(0.05)


def seen(made: Scene, fault: Fault) -> dict[str, float]:
    """The samples that say what happened."""
    try:
        found = made.scrape(fault.where)
    except OSError:
        return {"up": 0.0} if fault.metric == "up" else {}
    return {name: value for name, value in found.items() if fault.metric and name.startswith(fault.metric) and value}


def steps_kept(made: Scene) -> int:
    """Steps whose frames can be read back."""
    if made.made is not None:
        store = made.made.redis.store()
        try:
            return len({frame.step for frame in store.read("r", StepFrame)})
        finally:
            store.close()
    assert made.disk is not None
    found = [item for item in endpoint.read_all(made.disk) if item.store]
    if not found:
        return 0
    with_file = SqliteStore(Path(found[0].store), read_only=True)
    try:
        return len({frame.step for frame in with_file.read("r", StepFrame)})
    finally:
        with_file.close()


def step_of(progress: Path) -> int:
    """How far training had come, to 50 steps."""
    return int(progress.read_text() or 0)


def until_judged(made: Scene, steps: int, since: float) -> float | None:
    """Seconds from `since` until `steps` steps were judged; None: they were not in good time."""
    while time.monotonic() < since + RECOVERY_SECONDS:
        with contextlib.suppress(Exception):  # while Redis is away it cannot be read
            if judged(made) >= steps:
                return round(time.monotonic() - since, 2)
        time.sleep(0.1)
    return None


def judged(made: Scene) -> int:
    """Newest step that the controller has decided about."""
    if made.made is not None:
        store = made.made.redis.store()
    else:
        assert made.disk is not None
        store = SqliteStore(Path(next(endpoint.read_all(made.disk)).store), read_only=True)  # type: ignore[assignment]
    try:
        return max((record.last_step for record in store.runs() if record.run == "r"), default=0)
    finally:
        store.close()


def judge_all(known: dict[str, dict[str, Any]]) -> None:
    for row in known.values():
        if "left_out" not in row:
            judge(row)


if __name__ == "__main__":
    raise SystemExit(main())
