"""Recorded runs in one small file: every rank's frames and layouts, column by column, compressed with xz.

A frame's numbers are stored beside those of the steps before and after it (tensor by tensor, byte plane by byte plane),
which compresses several times better than frame after frame. What runs of one file have in common (the same training up
to a fault) is stored once. Runs are read back exactly as they were written.
Written by tools that keep runs for later (`write`), read by `fp8watch replay` (`read`).
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch.atomic_file import replace_file
from fp8watch.controller.merge import Merger
from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.records import Column, Layout, StepFrame
from fp8watch.replay.recording import Recording

SUFFIX = ".fp8rec"
FORMAT_VERSION = 1
LIMIT_BYTES = 1 << 30
"""Largest unpacked size; larger files are refused."""
_MAGIC = b"\xfd7zXZ\x00"
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(f"<{name}") for name in ("f4", "f8", "u8", "u1", "i8")}

Array = npt.NDArray[Any]


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """[len(rows), width] values; `rows`: indices (u4) of the frames that have them (None: all)."""

    name: str
    dtype: str
    width: int
    data: bytes
    rows: bytes | None = None
    valid: bytes | None = None
    """[len(rows), width] bits; None: every element was observed."""


class _Rank(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    num_frames: int
    heads: list[_Table]
    """Each frame's attempt, step, layout_id, updates_forward, updates_backward, time_unix."""
    scalars: list[_Table]
    columns: list[_Table]


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    layouts: list[Layout]
    ranks: list[_Rank]
    notes: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    runs: list[_Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run in a file."""

    run: str
    frames: list[StepFrame]
    """Frames of any ranks and attempts; those of each rank are in order."""
    layouts: list[Layout]
    notes: dict[str, Any] = field(default_factory=dict)
    """Whatever the writer wants to keep with the frames."""

    def samples(self) -> Iterator[Sample]:
        """The samples that a controller makes from the frames."""
        known = sorted(self.layouts, key=lambda layout: layout.attempt)
        frames = sorted(self.frames, key=lambda frame: (frame.attempt, frame.step, frame.rank))
        merger = Merger(num_ranks=max(1, len({frame.rank for frame in frames})))
        attempt: int | None = None
        for frame in frames:
            if frame.attempt != attempt:
                attempt = frame.attempt
                merger.restart(frame.step - 1)
                for layout in known:
                    if layout.attempt <= attempt:
                        merger.layout(layout)
            yield from merger.frame(frame)
        yield from merger.flush()


def is_recording(path: Path) -> bool:
    """Whether the file is of this format, by its name and first bytes."""
    if path.suffix != SUFFIX:
        return False
    with path.open("rb") as handle:
        return handle.read(len(_MAGIC)) == _MAGIC


def write(path: Path, runs: Iterable[RecordedRun]) -> None:
    """Write runs to a file, in this order: all of them or, if it fails, none."""
    packed = []
    for run in runs:
        by_rank: dict[int, list[StepFrame]] = {}
        for frame in run.frames:
            by_rank.setdefault(frame.rank, []).append(frame)
        ranks = [_pack_rank(rank, by_rank[rank]) for rank in sorted(by_rank)]
        packed.append(_Run(run=run.run, layouts=run.layouts, ranks=ranks, notes=run.notes))
    content = msgspec.msgpack.encode(_File(version=FORMAT_VERSION, runs=packed))
    # A window larger than the content takes memory for nothing.
    preset = 6 if len(content) < 8 * 1024**2 else 9
    replace_file(path, lzma.compress(content, preset=preset | lzma.PRESET_EXTREME), durable=False)


def load(path: Path) -> list[RecordedRun]:
    """The runs of a file. Raises `BadInput` if it is damaged, too large or of a newer format."""
    reader = lzma.LZMADecompressor()
    if path.stat().st_size > LIMIT_BYTES:
        raise BadInput([f"{path}:1: recording: larger than {LIMIT_BYTES} bytes"])
    try:
        data = reader.decompress(path.read_bytes(), max_length=LIMIT_BYTES)
        if not reader.eof:
            raise BadInput([f"{path}:1: recording: cut off, or larger than {LIMIT_BYTES} bytes unpacked"])
        content = msgspec.msgpack.decode(data, type=_File)
    except (lzma.LZMAError, msgspec.DecodeError) as error:
        raise BadInput([f"{path}:1: recording: {error}"]) from error
    if content.version > FORMAT_VERSION:
        raise BadInput([f"{path}:1: recording: format {content.version}, this reads up to {FORMAT_VERSION}"])
    return [
        RecordedRun(
            run=run.run,
            frames=[frame for rank in run.ranks for frame in _unpack_rank(path, run.run, rank)],
            layouts=run.layouts,
            notes=run.notes,
        )
        for run in content.runs
    ]


def read(path: Path) -> list[Recording]:
    """The runs of a file as recordings. Raises as `load`."""
    return [
        Recording(run=run.run, source="fp8watch", samples=run.samples(), may_be_filtered=False) for run in load(path)
    ]


_HEADS = ("attempt", "step", "layout_id", "updates_forward", "updates_backward")


def _pack_rank(rank: int, frames: list[StepFrame]) -> _Rank:
    heads = [_table(name, "i8", None, np.array([[getattr(f, name)] for f in frames])) for name in _HEADS]
    heads.append(_table("time_unix", "f8", None, np.array([[frame.time_unix] for frame in frames])))
    scalars = []
    for name in dict.fromkeys(name for frame in frames for name in frame.scalars):
        rows = [i for i, frame in enumerate(frames) if name in frame.scalars]
        values = np.array([[frames[i].scalars[name]] for i in rows])
        with np.errstate(over="ignore"):
            # Compared bit by bit, so that a NaN's payload is kept too.
            short = values.astype(np.float32).astype(np.float64)
            is_short = bool((short.view(np.uint64) == values.astype(np.float64).view(np.uint64)).all())
        scalars.append(_table(name, "f4" if is_short else "f8", _rows(rows, frames), values))
    tables = []
    kinds = {(name, c.dtype, len(c.data)) for frame in frames for name, c in frame.columns.items()}
    for name, dtype, size in sorted(kinds):
        rows = [
            i
            for i, frame in enumerate(frames)
            if name in frame.columns and (frame.columns[name].dtype, len(frame.columns[name].data)) == (dtype, size)
        ]
        if size == 0:
            continue
        values = np.array([np.frombuffer(frames[i].columns[name].data, _DTYPES[dtype]) for i in rows])
        bits = [frames[i].columns[name].valid for i in rows]
        valid = None
        if any(bits):
            valid = np.array([np.frombuffer(b or _all_valid(values.shape[1]), np.uint8) for b in bits])
        tables.append(_table(name, dtype, _rows(rows, frames), values, valid))
    return _Rank(rank=rank, num_frames=len(frames), heads=heads, scalars=scalars, columns=tables)


def _all_valid(width: int) -> bytes:
    return np.packbits(np.ones(width, np.bool_), bitorder="little").tobytes()


def _rows(rows: list[int], frames: list[StepFrame]) -> bytes | None:
    return None if len(rows) == len(frames) else np.array(rows, "<u4").tobytes()


def _table(name: str, dtype: str, rows: bytes | None, values: Array, valid: Array | None = None) -> _Table:
    return _Table(
        name=name,
        dtype=dtype,
        width=values.shape[1],
        data=_to_planes(values.astype(_DTYPES[dtype])),
        rows=rows,
        valid=None if valid is None else _to_planes(valid),
    )


def _to_planes(values: Array) -> bytes:
    """[time, tensor] -> [byte, tensor, time], which puts bytes that are alike side by side."""
    bytes_of = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, values.dtype.itemsize)
    return np.ascontiguousarray(bytes_of.transpose(2, 1, 0)).tobytes()


def _from_planes(data: bytes, dtype: np.dtype[Any], width: int) -> Array:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, width, -1)
    values: Array = np.ascontiguousarray(planes.transpose(2, 1, 0)).view(dtype)[..., 0]
    return values


def _unpack_rank(path: Path, run: str, rank: _Rank) -> list[StepFrame]:
    try:
        heads = {table.name: _values(table, rank.num_frames)[1][:, 0] for table in rank.heads}
        scalars: list[dict[str, float]] = [{} for _ in range(rank.num_frames)]
        columns: list[dict[str, Column]] = [{} for _ in range(rank.num_frames)]
        for table in rank.scalars:
            rows, values = _values(table, rank.num_frames)
            for row, value in zip(rows.tolist(), values[:, 0].tolist(), strict=True):
                scalars[row][table.name] = float(value)
        for table in rank.columns:
            rows, values = _values(table, rank.num_frames)
            width = (table.width + 7) // 8
            bits: list[bytes | None] = [None] * len(rows)
            if table.valid is not None:
                held = _from_planes(table.valid, np.dtype(np.uint8), width)
                bits = [None if row == _all_valid(table.width) else row for row in map(bytes, held)]
            for i, row in enumerate(rows.tolist()):
                columns[row][table.name] = Column(
                    dtype=table.dtype,  # type: ignore[arg-type]
                    data=values[i].tobytes(),
                    valid=bits[i],
                )
        return [
            StepFrame(
                run=run,
                rank=rank.rank,
                scalars=scalars[i],
                columns=columns[i],
                time_unix=float(heads["time_unix"][i]),
                attempt=int(heads["attempt"][i]),
                step=int(heads["step"][i]),
                layout_id=int(heads["layout_id"][i]),
                updates_forward=int(heads["updates_forward"][i]),
                updates_backward=int(heads["updates_backward"][i]),
            )
            for i in range(rank.num_frames)
        ]
    except (KeyError, ValueError, IndexError) as error:
        raise BadInput([f"{path}:1: recording: rank {rank.rank}: {error}"]) from error


def _values(table: _Table, num_frames: int) -> tuple[Array, Array]:
    values = _from_planes(table.data, _DTYPES[table.dtype], table.width)
    rows = np.arange(num_frames) if table.rows is None else np.frombuffer(table.rows, "<u4").astype(np.int64)
    if len(values) != len(rows):
        raise ValueError(f"{table.name}: {len(values)} rows for {len(rows)} frames")
    return rows, values
