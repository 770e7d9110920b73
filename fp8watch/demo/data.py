"""Training text that exists on every machine: the sources of Python's own standard library, as bytes.

Every item is a function of (seed, index) alone, so twin runs see the same batches, and a data position is one number.
The loader is torch's own `DataLoader`. Faults in the data are faults of the dataset, tied to sample indices, so they
come back when the data is read again.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

NUM_BYTES = 256
"""Size of the vocabulary: each byte is a token."""

CORPUS_LIMIT_BYTES = 8 * 1024**2
"""More than a demo reads, and little enough to keep start-up under a second."""

# Left out: tables and generated text (easy bytes that make batches uneven), tests, and what differs between machines.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3", "turtledemo", "ensurepip"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_PREFIX = "_sysconfigdata"

Item = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""inputs (length,) int64, targets (length,) int64, weight () float32: how much the sample's loss counts."""


def source_files(root: Path) -> list[Path]:
    """The Python sources under `root`, in a fixed order (by relative path)."""
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and not path.name.startswith(_SKIPPED_PREFIX):
            files.append(relative)
    return [root / relative for relative in sorted(files, key=lambda path: path.as_posix())]


@lru_cache(maxsize=1)
def corpus() -> npt.NDArray[np.uint8]:
    """The text, at most `CORPUS_LIMIT_BYTES` uint8. Raises `OSError` where no standard library source can be read."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in source_files(root):
        try:
            text = path.read_bytes()
        except OSError:  # a dangling link in a distribution's package: the next file will do
            continue
        parts.append(text)
        size += len(text)
        if size >= CORPUS_LIMIT_BYTES:
            break
    data = np.frombuffer(b"".join(parts)[:CORPUS_LIMIT_BYTES], dtype=np.uint8)
    if len(data) < 64 * 1024:
        raise OSError(f"only {len(data)} bytes of Python source under {root}: no text to train on")
    return data


class Windows(Dataset[Item]):
    """`num_samples` windows of `length` bytes, at places drawn from `seed`."""

    def __init__(self, *, seed: int, num_samples: int, length: int) -> None:
        self._text = corpus()
        self._length = length
        places = np.random.default_rng(seed)
        self._starts = places.integers(0, len(self._text) - length - 1, size=num_samples)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Item:
        start = int(self._starts[index])
        window = torch.from_numpy(self._text[start : start + self._length + 1].astype(np.int64))
        return window[:-1], window[1:], torch.ones(())


def loader(dataset: Dataset[Item], *, batch_size: int) -> DataLoader[Item]:
    """Batches in the dataset's order: (inputs (B, T), targets (B, T), weights (B,))."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, drop_last=True)
