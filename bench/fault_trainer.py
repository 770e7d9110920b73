"""The training process that `bench/faults.py` watches, timed on its own thread.

    python bench/fault_trainer.py RESULT [--kind plain|nonfinite]

It trains a small model in emulated FP8 until a file `RESULT` with the suffix `.stop` is there, and writes one row a
step: when it began, how long it took, and how much of it was inside `watch.step`. Each in three measures: wall time;
CPU time of the thread; and own time. Where the thread gave its core up of itself (`ru_nvcsw`), that is wall time less
what the kernel says the process's threads waited for a core (`/proc/self/task/*/schedstat`); where it did not, it has
blocked on nothing, and own time is its CPU time. So own time holds every lock, sleep and system call, and neither the
machine's other work nor a virtual machine that is stopped for a moment.

Steps come in turns of two kinds. `HURRIED` ones follow each other without a pause, as a rank that its own host holds
up: the interpreter is never free, so whatever of fp8watch wants it is in training's way. In each of the `PACED` ones
the thread waits `DEVICE_SECONDS`, as for a GPU's work: those tell how much longer a run takes, for most of such a
step does not depend on how fast this machine's cores happen to be at the moment.

`nonfinite`: while a file with the suffix `.on` is there, every gradient holds at least 10,000 values that are not
finite, and the update is left out, as a loop that checks would do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SIZE, BATCH = 128, 32
"""Of the model: about 2 ms a step on one core, 66,000 parameters."""
HURRIED, PACED = 20, 10
DEVICE_SECONDS = 0.04
FIELDS = ("began", "wall", "own", "inside_wall", "inside_own", "inside_cpu", "is_paced")


class Waited:
    """Seconds that the threads of this process have waited for a core so far; 0 where the kernel does not say.

    All of them: a thread that waits for the interpreter's lock waits for the thread that holds it to get a core.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self.refresh()

    @property
    def is_known(self) -> bool:
        return bool(self._files)

    def refresh(self) -> None:
        """Look for threads that are new or gone."""
        try:
            now = set(os.listdir("/proc/self/task"))
            for name in now - self._files.keys():
                self._files[name] = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY)
        except OSError:
            return
        for name in self._files.keys() - now:
            os.close(self._files.pop(name))

    def __call__(self) -> float:
        return sum(map(_waited, self._files.values())) / 1e9

    def own(self) -> float:
        """Of the calling thread alone."""
        file = self._files.get(str(threading.get_native_id()))
        return 0.0 if file is None else _waited(file) / 1e9


def _waited(file: int) -> int:
    """Nanoseconds; 0 for a thread that has ended, which is left out from the next `refresh` on."""
    try:
        return int(os.pread(file, 96, 0).split()[1])
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class Moment:
    """Of the training thread."""

    wall: float
    cpu: float
    waited: float
    blocked: int
    """Times that it gave its core up of itself."""

    def until(self, end: Moment) -> tuple[float, float, float]:
        """Wall, own and CPU seconds to a later moment."""
        wall, cpu = end.wall - self.wall, end.cpu - self.cpu
        own = cpu if end.blocked == self.blocked else max(cpu, wall - (end.waited - self.waited))
        return wall, own, cpu


def now(waited: Waited) -> Moment:
    blocked = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return Moment(time.monotonic(), time.thread_time(), waited(), blocked)


def wait_for_device(waited: Waited) -> tuple[float, float]:
    """Wall and own seconds until the thread runs again: the interpreter's lock it waits for counts, a core does not.

    Only its own wait for a core is left out: what fp8watch's threads do meanwhile holds up nobody.
    """
    wall, core = time.monotonic(), waited.own()
    time.sleep(DEVICE_SECONDS)
    wall = time.monotonic() - wall
    return wall, wall - (waited.own() - core)


def train(result: Path, kind: str) -> None:
    import torch
    from torch import nn

    import fp8watch
    from fp8watch.emulation import convert

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.SiLU(), nn.Linear(2 * SIZE, SIZE))
    convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = torch.randn(BATCH, SIZE), torch.randn(BATCH, SIZE)
    watch = fp8watch.attach(model, optimizer, policy="observe")
    stop, on, waited = result.with_suffix(".stop"), result.with_suffix(".on"), Waited()
    rows: list[tuple[float, ...]] = []
    step = num_nonfinite = 0
    while not stop.exists():
        is_bad = kind == "nonfinite" and on.exists()
        step += 1
        waited.refresh()
        began = now(waited)
        batch = torch.full_like(inputs, float("nan")) if is_bad else inputs
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        if is_bad:
            num_nonfinite = sum(int((~p.grad.isfinite()).sum()) for p in model.parameters() if p.grad is not None)
        watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
        if not is_bad:
            optimizer.step()
        optimizer.zero_grad()
        done = now(waited)
        is_paced = step % (HURRIED + PACED) >= HURRIED
        device = wait_for_device(waited) if is_paced else (0.0, 0.0)
        before = now(waited)
        watch.step(loss)
        inside = before.until(now(waited))
        parts = (began.until(done), device, inside)
        wall, own = sum(part[0] for part in parts), sum(part[1] for part in parts)
        rows.append((began.wall, wall, own, *inside, is_paced))
        if step == 1 or step % 50 == 0:
            result.with_suffix(".step").write_text(str(step))
    watch.detach()
    result.write_text(
        json.dumps({"fields": FIELDS, "rows": rows, "own_is_known": waited.is_known, "nonfinite": num_nonfinite})
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--kind", choices=["plain", "nonfinite"], default="plain")
    chosen = parser.parse_args()
    train(chosen.result, chosen.kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
