"""The order of a frame's per-tensor columns, and the columns themselves.

Everybody imports them from `fp8watch.records`; they are here to keep that file short.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fp8watch.bounds import Attempt, Count, History, Name, Rank, Sequence


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every record."""


class TensorColumn(Record, frozen=True, kw_only=True):
    """One quantized tensor of one module: one position in every per-tensor column of a frame."""

    module: str
    """Qualified module name, e.g. `blocks.3.mlp.down`: ranks are matched by it."""
    tensor: Literal["input", "weight", "output", "grad_output", "grad_input"]
    block: str
    """Transformer block the module belongs to (`3`), or the top-level name (`head`)."""
    fp8_format: str
    """Key of `fp8watch.formats.FORMATS`."""
    recipe: str = "delayed"
    """delayed, current, block, mxfp8, nvfp4."""
    history_len: History = 1
    """Number of updates in the amax window (delayed scaling; micro-batches count, not steps)."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: float = 0.0
    """Head-room in powers of two: scale = fp8_max / amax / 2^margin."""
    source: Literal["tapped", "read", "measured"] = "read"
    """How the numbers are obtained."""

    @property
    def name(self) -> str:
        """`module:tensor`, the way a finding names a tensor."""
        return f"{self.module}:{self.tensor}"


class Layout(Record, frozen=True, kw_only=True, tag="layout"):
    """The order of the per-tensor columns, announced once, and again whenever it or a recipe changes."""

    run: Name
    attempt: Attempt
    rank: Rank
    layout_id: Sequence
    columns: list[TensorColumn]
    expected_modules: Count
    observed_modules: Count
    not_observable: list[str] = []
    """`name: reason` for everything that cannot be seen."""
    aliases: dict[str, list[str]] = {}
    """Modules and parameters that the model holds in several places: the name used here -> their other names."""


class Column(Record, frozen=True, kw_only=True):
    """A packed little-endian array, one element per tensor; `fp8watch.columns` reads it."""

    dtype: Literal["f4", "u8", "u1"]
    data: bytes
    valid: bytes | None = None
    """Validity bitmap (numpy packbits, little bit order); None: every element was observed."""
