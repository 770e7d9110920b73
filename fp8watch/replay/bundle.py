"""An incident as one file to keep, send and replay: findings and actions, and the frames around them.

A ZIP archive: `report.txt` for people; `manifest.json` (versions, window, checksums, whether a replay reproduces the
findings); `trace.jsonl`, `findings.json`, `actions.json`, `results.json`, `hello.json`, `policy.yaml`; `frames.sqlite`
(a store with every rank's frames at full resolution, and their layouts); `samples.json` (the steps, with the
checkpoints and decisions of each) and `state.msgpack` (the state of the detectors before the first frame), so that
`fp8watch replay bundle.zip` finds the same again, and a policy has the same to choose from.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fp8watch import __version__
from fp8watch.atomic_file import replacing
from fp8watch.controller.closer import CloserLooks
from fp8watch.controller.merge import merge
from fp8watch.controller.stores.base import Store
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import BadInput
from fp8watch.records import Finding, Layout, StepFrame, TraceEntry
from fp8watch.replay.detected import open_troubles
from fp8watch.replay.incident import Incident
from fp8watch.replay.recording import Facts, Recording, Seen
from fp8watch.replay.window import MARGIN_STEPS, Window, of_incident, with_log

logger = logging.getLogger(__name__)
FORMAT_VERSION = 1
LIMIT_BYTES = 256 << 20
"""Largest unpacked size of a part that is read into memory."""
FRAMES = "frames.sqlite"
FRAMES_LIMIT_BYTES = 8 << 30
"""Largest unpacked size of the frames, which go to disk."""
_BLOCK_BYTES = 1 << 20
_CHANGED = "its checksum is not the manifest's: it was changed or damaged"
SUFFIX = ".zip"
_OF_DETECTORS = re.compile(r"(\d+-)?f\d+")
"""Ids of the detectors' findings. The controller's own findings (data that repeats) need more than frames."""


def export(store: Store, incident: Incident, path: Path) -> dict[str, Any]:
    """Write a bundle and return its manifest. Replays the run once to get the detectors' state.

    Raises `OSError`, and then leaves the file at `path` as it was.
    """
    window, state = of_incident(store, incident, _OF_DETECTORS)
    with tempfile.TemporaryDirectory() as folder:
        frames = Path(folder) / FRAMES
        num_frames = _copy_frames(store, incident, window, frames)
        files: dict[str, bytes] = {
            "report.txt": "\n".join(incident.story()).encode(),
            "trace.jsonl": b"\n".join(msgspec.json.encode(entry) for entry in incident.trace) + b"\n",
            "findings.json": _json(incident.findings),
            "actions.json": _json(incident.actions),
            "results.json": _json(incident.results),
            "hello.json": _json(incident.record.hello),
            "policy.yaml": (incident.record.hello.policy or "version: 1\nmode: observe\n").encode(),
            "samples.json": msgspec.json.encode(window),
        }
        if state is not None:
            files["state.msgpack"] = state
        with contextlib.closing(SqliteStore(frames, read_only=True)) as copied:
            steps = _steps(copied, window, state, incident.record.run)
            again = [finding for seen in steps for finding in seen.findings]
        manifest = _manifest(store, incident, window, num_frames, again)
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        manifest["sha256"] = sums | {FRAMES: _sum_of(frames)}
        with _written(path) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", json.dumps(manifest, indent=2))
            for name, data in files.items():
                archive.writestr(name, data)
            archive.write(frames, FRAMES)
    return manifest


def _written(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """A file that is written whole or not at all. A link stays a link; a device or a pipe is written, not replaced."""
    if path.exists() and not path.is_file():
        return path.open("wb")
    return replacing(path.resolve(), durable=True)


def _manifest(
    store: Store, incident: Incident, window: Window, num_frames: int, again: list[Finding]
) -> dict[str, Any]:
    keys = {(row.attempt, row.step) for row in window.rows}
    expected = [
        item
        for item in store.read(incident.record.run, Finding)
        if (item.attempt, item.step) in keys and _OF_DETECTORS.fullmatch(item.id)
    ]
    return {
        "format": FORMAT_VERSION,
        "fp8watch": __version__,
        "run": incident.record.run,
        "incident": incident.name,
        "policy": incident.record.hello.policy_name,
        "versions": incident.record.hello.framework,
        "first_step": incident.first_step - MARGIN_STEPS,
        "last_step": incident.last_step + MARGIN_STEPS,
        "samples": len(window.rows),
        "frames": num_frames,
        "reproduces": again == expected and bool(expected),
    }


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=_text), indent=1)


def _text(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(bytes(value)).decode()
    return str(value)


def _copy_frames(store: Store, incident: Incident, window: Window, path: Path) -> int:
    run = incident.record.run
    keys = {(row.attempt, row.step) for row in window.rows}
    attempts = {row.attempt for row in window.rows}
    count = 0
    with contextlib.closing(SqliteStore(path)) as copy:
        copy.append(run, [incident.record, *incident.findings, *incident.actions])
        copy.append(run, [layout for layout in store.read(run, Layout) if layout.attempt in attempts])
        frames = store.read(run, StepFrame, incident.first_step - MARGIN_STEPS, incident.last_step + MARGIN_STEPS)
        chosen = (frame for frame in frames if (frame.attempt, frame.step) in keys)
        while chunk := list(itertools.islice(chosen, 64)):
            copy.append(run, chunk)
            count += len(chunk)
    return count


def is_bundle(path: Path) -> bool:
    """Whether the file is an archive that may be one of ours."""
    return path.suffix == SUFFIX and zipfile.is_zipfile(path)


def read(path: Path) -> list[Recording]:
    """The recording in a bundle. Raises `BadInput` if the archive is no bundle, damaged or of a newer format."""
    try:
        with zipfile.ZipFile(path) as archive:
            with archive.open("manifest.json") as packed:
                manifest = json.loads(packed.read(_BLOCK_BYTES))
            if manifest["format"] > FORMAT_VERSION:
                reason = f"format {manifest['format']}, this reads up to {FORMAT_VERSION}"
                raise BadInput([f"{path}:1: bundle: {reason}"])
            window = msgspec.json.decode(_checked(path, archive, manifest, "samples.json"), type=Window)
            trace = _checked(path, archive, manifest, "trace.jsonl").splitlines()
            window = with_log(window, [msgspec.json.decode(line, type=TraceEntry) for line in trace if line])
            policy = _checked(path, archive, manifest, "policy.yaml").decode()
            has_state = "state.msgpack" in archive.namelist()
            state = _checked(path, archive, manifest, "state.msgpack") if has_state else None
            run = str(manifest["run"])
    except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise BadInput([f"{path}:1: bundle: damaged ({error})"]) from error
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # recursion too
        # Another program's archive: with other contents, another compression, or a password.
        logger.debug("%s is no bundle", path, exc_info=True)
        made_by = "what `fp8watch incident export` writes has a manifest.json with its format, run and checksums"
        raise BadInput([f"{path}:1: bundle: an archive, but no incident bundle: {made_by}"]) from error

    facts = Facts(policy=policy, unavailable=window.unavailable, warmup_steps=window.warmup_steps)

    def steps() -> Iterator[Seen]:
        facts.saved = list(window.known)
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
            frames = Path(folder) / FRAMES
            _unpack(path, archive, manifest, FRAMES, frames)
            with contextlib.closing(SqliteStore(frames, read_only=True)) as store:
                yield from _steps(store, window, state, run, facts)

    return [Recording(run=run, source="bundle", samples=iter(()), may_be_filtered=False, facts=facts, steps=steps)]


def _checked(path: Path, archive: zipfile.ZipFile, manifest: dict[str, Any], name: str) -> bytes:
    with archive.open(name) as packed:
        data = packed.read(LIMIT_BYTES + 1)  # the size that the archive declares may be wrong
    if len(data) > LIMIT_BYTES:
        raise BadInput([f"{path}:1: {name}: larger than {LIMIT_BYTES} bytes"])
    if hashlib.sha256(data).hexdigest() != manifest["sha256"][name]:
        raise BadInput([f"{path}:1: {name}: {_CHANGED}"])
    return data


def _unpack(path: Path, archive: zipfile.ZipFile, manifest: dict[str, Any], name: str, target: Path) -> None:
    """Unpack a large part into a file, block by block."""
    digest, size = hashlib.sha256(), 0
    try:
        with archive.open(name) as packed, target.open("wb") as out:
            while block := packed.read(_BLOCK_BYTES):
                size += len(block)
                if size > FRAMES_LIMIT_BYTES:
                    raise BadInput([f"{path}:1: {name}: larger than {FRAMES_LIMIT_BYTES} bytes"])
                digest.update(block)
                out.write(block)
        is_same = digest.hexdigest() == manifest["sha256"][name]
    except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        raise BadInput([f"{path}:1: {name}: missing or damaged ({error})"]) from error
    if not is_same:
        raise BadInput([f"{path}:1: {name}: {_CHANGED}"])


def _sum_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _steps(
    store: SqliteStore, window: Window, state: bytes | None, run: str, facts: Facts | None = None
) -> Iterator[Seen]:
    """Run the window's samples through the detectors, which continue from their saved state. Updates `facts`."""
    layouts = {(item.attempt, item.rank, item.layout_id): item for item in store.read(run, Layout)}
    pipeline, generation = Pipeline(run), window.rows[0].generation if window.rows else 0
    if state is not None:
        try:
            pipeline.load(state)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("bundle of run %s: the detectors start afresh, their state cannot be read: %s", run, error)
    closer, attempt = CloserLooks(), None
    for row in window.rows:
        if row.generation != generation:
            pipeline, generation = Pipeline(run), row.generation
        if (row.attempt, row.generation) != attempt:
            closer, attempt = CloserLooks(), (row.attempt, row.generation)
        if facts is not None:
            facts.saved += row.saved
        frames = [item for item in store.read(run, StepFrame, row.step, row.step) if item.attempt == row.attempt]
        if not frames:
            continue
        known = {(r, i): layout for (attempt, r, i), layout in layouts.items() if attempt == row.attempt}
        sample = merge(sorted(frames, key=lambda item: item.rank), known)
        sample = dataclasses.replace(sample, is_quiet=row.is_quiet, expected_ranks=row.expected_ranks)
        closer.take(sample)
        prefix = window.prefixes.get(generation, "")
        findings = [
            closer.with_closer_look(
                msgspec.structs.replace(item, id=prefix + item.id, incident=prefix + item.incident), sample
            )
            for item in pipeline.observe(sample)
        ]
        yield Seen(
            sample=sample, findings=findings, troubles=lambda now=pipeline: open_troubles(now),  # type: ignore[misc]
            trace=row.trace,
        )  # fmt: skip
