"""A checkpoint that is being saved, as one rank sees it.

Every rank writes its own files, then a small one that says so. Nobody waits for anybody, unless the storage makes ranks
wait for each other: then all begin or none (`fp8watch.checkpoints.together`). At each boundary the first
rank looks whether all have said so, and only then writes the manifest and gives the folder its final name. Until then
the checkpoint is pending: neither a target nor a reason to remove an older one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from fp8watch.atomic_file import replace_file, sync_directory
from fp8watch.checkpoints import contents, manifest
from fp8watch.checkpoints.aside import later
from fp8watch.checkpoints.checksum import all_finite, parameter_checksum
from fp8watch.checkpoints.files import write_synced
from fp8watch.checkpoints.manifest import FileEntry, Manifest, RankPart
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place
from fp8watch.checkpoints.storage import (
    Poll,
    Prepared,
    Storage,
    measure_all,
    names_of_nobody,
    refuse_unsaved,
    write_files,
)
from fp8watch.errors import CheckpointError

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 1800.0
"""How long the other ranks' parts are looked for: ranks that train together are never that far apart (NCCL gives a
collective ten minutes by default), so a part that is not there by then lies somewhere else."""


class Underway:
    """One checkpoint under way. `advance` is called at each boundary until it gives something back."""

    def __init__(
        self, folder: Path, final: Path, *, step: int, attempt: int, reason: str, place: Place, started: float
    ) -> None:
        """`folder` is the temporary one, the same for all ranks; `started` in seconds of a monotonic clock."""
        self.folder, self.final = folder, final
        self.step, self.attempt, self.reason = step, attempt, reason
        self.part: RankPart | None = None
        """This rank's part, once it is durable."""
        self._place, self._started = place, started
        self._poll: Poll | None = None
        self._described: RankPart | None = None
        self._collected: list[RankPart] | None = None
        self._summing: Future[dict[str, FileEntry]] | None = None
        self._is_looked_at = False
        self._failed_by: str = ""

    def begin(self, parts: TrainingParts, storage: Storage, ask: Callable[[str], str] = str) -> None:
        """Take the state as it is now and begin to write it. Raises `CheckpointError`; the others are told then.

        `ask` is told once why this rank cannot begin, or nothing, and says why no rank does, or nothing.
        """
        prepared: Prepared | None = None
        cannot: Exception | None = None
        try:
            self.folder.mkdir(exist_ok=self._place.layout != "whole")
            captured = contents.capture(parts, self._place, with_weights=not storage.writes_own_files)
            checksum, is_finite = parameter_checksum(parts.model), all_finite(parts.model)
            prepared = storage.prepare(self.folder, parts, self._place)
            if storage.writes_own_files:
                state = captured.files[self._place.state_file]
                state[contents.OWN], state[contents.KEPT] = contents.own_state(parts.model), prepared.kept
        except Exception as error:  # a part may raise anything
            cannot = error
        why = ask("" if cannot is None else str(cannot) or type(cannot).__name__)
        try:
            if prepared is None or why:
                if prepared is not None:
                    prepared.cancel()
                raise CheckpointError(why) from cannot
            self._poll = prepared.begin()
            files = write_files(self.folder, captured.files, captured.common)
            self._described = contents.describe_part(
                parts, captured, files, rank=self._place.rank, checksum=checksum, is_finite=is_finite
            )  # fmt: skip
        except Exception as error:  # torch.save reports a full disk as RuntimeError
            self._give_up(str(error))
            raise CheckpointError(f"checkpoint of step {self.step} could not be saved: {error}") from error

    def advance(self, now: float, time_unix: float, storage: str, run: str) -> Manifest | None:
        """Go on as far as is possible now; the manifest when the checkpoint is complete (first rank only).

        Raises `CheckpointError` when it never will be.
        """
        is_first_look, self._is_looked_at = not self._is_looked_at, True
        if self.part is None:
            self._finish_own_part()
        if self.part is None or self._place.rank != 0:
            return None
        if self._collected is None:
            self._collected = self._collect(now)
        if self._collected is None:
            return None
        shared = self._shared(self._collected, waits=is_first_look)
        return None if shared is None else self._complete(self._collected, shared, time_unix, storage, run)

    def _finish_own_part(self) -> None:
        assert self._poll is not None
        assert self._described is not None
        try:
            files = refuse_unsaved(self._poll)
        except CheckpointError as error:
            self._give_up(str(error))
            raise CheckpointError(f"checkpoint of step {self.step}: {error}") from error
        if files is None:
            return
        part = msgspec.structs.replace(self._described, files={**self._described.files, **files})
        if self._place.layout != "whole":
            try:
                replace_file(self.folder / self._place.part_file, msgspec.json.encode(part), durable=True)
            except OSError as error:
                self._give_up(str(error))
                raise CheckpointError(f"checkpoint of step {self.step} could not be saved: {error}") from error
        self.part = part

    def _collect(self, now: float) -> list[RankPart] | None:
        """All ranks' parts; None: some are missing yet."""
        assert self.part is not None
        saved = [self.part]
        missing = []
        for rank in range(1, self._place.world_size):
            file = self.folder / Place(rank=rank, world_size=self._place.world_size).part_file
            try:
                part = msgspec.json.decode(file.read_bytes(), type=RankPart)
            except FileNotFoundError:
                missing.append(rank)
                continue
            except (OSError, msgspec.DecodeError) as error:
                raise CheckpointError(f"checkpoint of step {self.step}: part of rank {rank}: {error}") from error
            if part.failed:
                self.discard()
                raise CheckpointError(f"checkpoint of step {self.step}: rank {rank} could not save: {part.failed}")
            saved.append(part)
        if not missing:
            written = {name for part in saved for name in part.files}
            owed = ((part.rank, file) for part in saved for file in (part.optimizer_file, part.also_file) if file)
            lost = next(((rank, file) for rank, file in owed if file not in written), None)
            if lost is None:
                return saved
            self.discard()
            raise CheckpointError(f"checkpoint of step {self.step}: nobody wrote {lost[1]}, a file of rank {lost[0]}")
        if now - self._started > GIVE_UP_SECONDS:
            self.discard()
            raise CheckpointError(
                f"checkpoint of step {self.step}: nothing was seen of rank {missing[0]} for {GIVE_UP_SECONDS:g} s; "
                "is the directory the same for all ranks?"
            )
        return None

    def _complete(
        self, saved: list[RankPart], shared: dict[str, FileEntry], time_unix: float, storage: str, run: str
    ) -> Manifest:
        try:
            written = contents.describe(
                saved, self._place, checkpoint=self.final.name, run=run, attempt=self.attempt, step=self.step,
                time_unix=time_unix, storage=storage, shared=shared,
            )  # fmt: skip
            for part in saved[1:]:
                (self.folder / Place(rank=part.rank, world_size=len(saved)).part_file).unlink(missing_ok=True)
            if self._place.layout != "whole":
                (self.folder / self._place.part_file).unlink(missing_ok=True)
            write_synced(self.folder / manifest.NAME, manifest.write(written))
            sync_directory(self.folder)
            os.rename(self.folder, self.final)
            sync_directory(self.final.parent)
        except OSError as error:
            self.discard()
            raise CheckpointError(f"checkpoint of step {self.step} could not be saved: {error}") from error
        return written

    def _shared(self, saved: list[RankPart], *, waits: bool) -> dict[str, FileEntry] | None:
        """Files that no rank has summed up; None: they are being. `waits`: training waits for the save itself."""
        known = {name for part in saved for name in part.files}
        try:
            if self._summing is None:
                names = names_of_nobody(self.folder, known)
                if waits or not names:
                    return measure_all(self.folder, names)
                self._summing = later(lambda: measure_all(self.folder, names))
            return self._summing.result() if self._summing.done() else None
        except (OSError, RuntimeError) as error:
            self.discard()
            raise CheckpointError(f"checkpoint of step {self.step} could not be saved: {error}") from error

    def _give_up(self, why: str) -> None:
        """Let the first rank know. Where not even that can be written, it gives up by itself after a while."""
        if self._place.layout == "whole" or self._place.rank == 0:
            self.discard()
            return
        with contextlib.suppress(OSError):
            failed = RankPart(rank=self._place.rank, failed=why)
            (self.folder / self._place.part_file).write_bytes(msgspec.json.encode(failed))

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
