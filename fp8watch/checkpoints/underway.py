"""A checkpoint being saved, as one rank sees it.

Every rank writes its own files, then a part file. Ranks do not wait for each other, unless the storage makes them: then
all begin or none (`fp8watch.checkpoints.together`). At each step boundary rank 0 looks for the part files. When all
exist it writes the manifest and renames the folder. Until then the checkpoint is pending: it is not a target, and no
reason to remove an older one.
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
from fp8watch.checkpoints.bit_sums import LATEST, WEIGHTED
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
"""How long to wait for other ranks' part files. Ranks that train together are never that far apart (the default timeout
of an NCCL collective is ten minutes), so a missing part is in another directory."""


class Underway:
    """A checkpoint being saved. `advance` is called at each step boundary until it returns a manifest."""

    def __init__(
        self, folder: Path, final: Path, *, step: int, attempt: int, reason: str, place: Place, started: float
    ) -> None:
        """`folder` is the temporary folder, the same for all ranks. `started`: seconds of a monotonic clock."""
        self.folder, self.final = folder, final
        self.step, self.attempt, self.reason = step, attempt, reason
        self.part: RankPart | None = None
        """This rank's part; None until it is durable."""
        self._place, self._started = place, started
        self._poll: Poll | None = None
        self._described: RankPart | None = None
        self._collected: list[RankPart] | None = None
        self._summing: Future[dict[str, FileEntry]] | None = None
        self._is_looked_at = False
        self._failed_by: str = ""

    def begin(
        self, parts: TrainingParts, storage: Storage, ask: Callable[[str], str] = str, algorithm: str = LATEST
    ) -> None:
        """Capture the current state and begin to write it. Raises `CheckpointError` and tells the other ranks.

        `ask` is called once with the reason why this rank cannot begin, or "". It returns the reason why no rank
        begins, or "". `algorithm`: of the parameters' checksum.
        """
        prepared: Prepared | None = None
        cannot: Exception | None = None
        try:
            self.folder.mkdir(exist_ok=self._place.layout != "whole")
            captured = contents.capture(parts, self._place, with_weights=not storage.writes_own_files)
            checksum, is_finite = parameter_checksum(parts.model, algorithm), all_finite(parts.model)
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
                parts, captured, files, rank=self._place.rank, checksum=checksum, algorithm=algorithm,
                is_finite=is_finite,
            )  # fmt: skip
        except Exception as error:  # torch.save reports a full disk as RuntimeError
            self._give_up(str(error))
            raise CheckpointError(f"checkpoint of step {self.step} could not be saved: {error}") from error

    def advance(self, now: float, time_unix: float, storage: str, run: str) -> Manifest | None:
        """Continue as far as possible. Returns the manifest when the checkpoint is complete (rank 0 only).

        Raises `CheckpointError` when the save has failed.
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
        """The parts of all ranks; None: some are still missing."""
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
            # Format 3 does not name the algorithm.
            saved.append(msgspec.structs.replace(part, checksum_algorithm=part.checksum_algorithm or WEIGHTED))
        if not missing:
            self._say_what_is_not_compared(saved)
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

    def _say_what_is_not_compared(self, saved: list[RankPart]) -> None:
        others = [part.rank for part in saved if part.checksum_algorithm != saved[0].checksum_algorithm]
        if others and self._place.layout == "replicas":
            logger.warning(
                "fp8watch: checkpoint of step %d: rank %d runs another version of fp8watch: whether its copy is the "
                "same is not known", self.step, others[0],
            )  # fmt: skip

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
        """Files that are in no rank's part; None: they are still being measured. `waits`: training waits for the
        save."""
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
        """Tell rank 0. If even that cannot be written, rank 0 gives up after `GIVE_UP_SECONDS`."""
        if self._place.layout == "whole" or self._place.rank == 0:
            self.discard()
            return
        with contextlib.suppress(OSError):
            failed = RankPart(rank=self._place.rank, failed=why)
            (self.folder / self._place.part_file).write_bytes(msgspec.json.encode(failed))

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
