"""Damaged logs of every kind are read, or refused with file and line, and take no more memory than a sound one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay_fuzz import KINDS, MUTATED, check, mutate
from fp8watch.replay.run import replay

GIB = 1 << 30


@settings(max_examples=120, deadline=None)
@given(name=st.sampled_from(list(KINDS)), seed=st.integers(0, 2**32), count=st.sampled_from(MUTATED))
def test_a_damaged_log_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, count: int
) -> None:
    rng = Random(seed)
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(mutate(KINDS[name](rng), rng, count=count))
    check(path)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_sound_log_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\n".join(KINDS[name](Random(0))))
    assert check(path) == 0


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n \n", b"\x00" * 100, bytes(range(256)) * 4])
def test_what_is_no_log_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert check(path) == 2


def test_a_header_alone_is_a_run_without_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n")
    out = io.StringIO()
    assert check(path) == 0
    assert replay([path], out=out, err=io.StringIO()) == 0
    assert not out.getvalue()


SOUND = b"\n".join(KINDS["run.csv"](Random(0)))


@pytest.mark.parametrize(
    ("encoding", "code"), [("utf-8-sig", 0), ("utf-16", 0), ("latin-1", 0), ("utf-16-le", 2), ("utf-32", 0)]
)
def test_encodings(tmp_path: Path, encoding: str, code: int) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(SOUND.decode().encode(encoding))
    assert check(path) == code


def test_bytes_of_no_encoding_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(SOUND.replace(b"\n7,", b"\n7\xff,"))
    err = io.StringIO()
    assert replay([path], out=io.StringIO(), err=err) == 2
    assert f"{path}:8: step: " in err.getvalue()


def rows(steps: list[int], losses: list[float]) -> str:
    return "step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in zip(steps, losses, strict=True))


@pytest.mark.parametrize(
    "steps",
    [
        [*range(1, 100), *range(400, 500), *range(500, 1500, 10)],
        [step for step in range(1, 200) for _ in range(2)],
        [*range(1, 150), *range(100, 250), *range(90, 200)],
        list(range(300, 0, -1)),
        [*range(0, 3000, 50), *range(3001, 3200)],
    ],
    ids=["gaps", "duplicates", "restarts", "decreasing", "mixed strides"],
)
def test_steps_that_jump_are_read_and_a_failure_after_them_is_found(tmp_path: Path, steps: list[int]) -> None:
    rng, path = Random(0), tmp_path / "run.csv"
    losses = [3 + rng.gauss(0, 0.02) for _ in steps]
    path.write_text(rows([*steps, max(steps) + 1], [*losses, float("nan")]))
    out, err = io.StringIO(), io.StringIO()
    is_backwards = steps[0] > steps[-1]
    assert replay([path], out=out, err=err) == (2 if is_backwards else 0)
    assert ("mostly do not grow" in err.getvalue()) == is_backwards
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    acts = [(line["detector"], line["step"]) for line in found if line["severity"] == "act"]
    assert acts == [("nonfinite", max(steps) + 1)]


PROGRAM = """
import resource, sys
from pathlib import Path
from fp8watch.replay.run import replay
resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))
sys.exit(replay([Path(sys.argv[1])]))
"""


@pytest.mark.parametrize("name", list(KINDS))
def test_a_line_of_a_gibibyte_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    head = KINDS[name](Random(0))[:2]
    with path.open("wb") as out:
        out.write(b"\n".join(head) + b"\n")
        out.truncate(GIB)  # a hole: a line of zeros that takes no space
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    line = 1 if name.endswith("json") else len(head) + 1
    assert f"{path}:{line}: " in done.stderr


def test_a_learning_rate_that_jumps_from_zero(tmp_path: Path) -> None:
    path, rates = tmp_path / "run.csv", [1e-3] * 20 + [0.0] + [1e-2] * 5
    path.write_text("step,loss,lr\n" + "".join(f"{i},3.0,{rate}\n" for i, rate in enumerate(rates, start=1)))
    assert check(path) == 0
