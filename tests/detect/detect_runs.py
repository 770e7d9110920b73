"""Synthetic runs for the detectors' tests: scalar series, and tensors under delayed scaling as in the libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.pipeline import Pipeline
from fp8watch.formats import FORMATS
from fp8watch.records import Finding, TensorColumn


def columns(history_len: int = 16, algo: str = "max", modules: int = 2, **more: Any) -> tuple[TensorColumn, ...]:
    return tuple(
        TensorColumn(
            module=f"blocks.{i}.mlp.down",
            tensor=tensor,  # type: ignore[arg-type]
            block=str(i),
            fp8_format="e5m2" if tensor == "grad_output" else "e4m3",
            history_len=history_len,
            amax_compute_algo=algo,  # type: ignore[arg-type]
            **more,
        )
        for i in range(modules)
        for tensor in ("input", "weight", "grad_output")
    )


class DelayedRun:
    """Delayed scaling of some tensors, written from the kernel's rules and sharing no code with the detector.

    Per update: a zero amax does nothing; else it enters the window; the scale becomes fp8_max / 2^margin / amax
    unless the window's amax is zero or not finite (the largest ignores NaN, as fmaxf does).
    """

    def __init__(self, tensors: tuple[TensorColumn, ...]) -> None:
        self.tensors = tensors
        self.windows: list[list[float]] = [[] for _ in tensors]
        self.scale = np.ones(len(tensors), dtype=np.float32)
        self.step = 0
        self.factor = np.ones(len(tensors))
        self.is_stuck = np.zeros(len(tensors), dtype=bool)

    def run(
        self, amax: Sequence[float] | np.ndarray, micro: Sequence[Sequence[float]] | None = None, **more: Any
    ) -> Sample:
        """One optimizer step; `micro`: amax of each micro-batch (then `amax` is ignored)."""
        self.step += 1
        batches = [np.asarray(m, dtype=np.float32) for m in micro] if micro else [np.asarray(amax, dtype=np.float32)]
        used = self.scale.copy()
        for batch in batches:
            used = self.scale.copy()
            for i, value in enumerate(batch):
                self._update(i, float(value))
        values = {"amax": np.max(batches, axis=0), "scale": (used * self.factor).astype(np.float32)}
        values["amax_last"] = batches[-1]
        return Sample(
            attempt=more.pop("attempt", 0),
            step=self.step,
            scalars=more.pop("scalars", {}),
            tensors=self.tensors,
            values=values | more.pop("values", {}),
            updates_forward=len(batches),
            updates_backward=len(batches),
            **more,
        )

    def _update(self, i: int, amax: float) -> None:
        if amax == 0:
            return
        column = self.tensors[i]
        self.windows[i] = [*self.windows[i], amax][-column.history_len :]
        window = self.windows[i]
        wanted = window[-1] if column.amax_compute_algo == "most_recent" else max(w for w in window if w == w)
        if self.is_stuck[i] or not np.isfinite(wanted):
            return
        self.scale[i] = np.float32(FORMATS[column.fp8_format].max * 2.0**-column.margin / wanted)


def scalars(step: int, attempt: int = 0, **values: float) -> Sample:
    return Sample(attempt=attempt, step=step, scalars=values)


def drive(detector: Any, samples: Iterable[Sample]) -> list[Symptom]:
    state, seen = detector.start(), []
    for sample in samples:
        state, symptoms = detector.update(state, sample)
        seen += symptoms
    return seen


def findings(samples: Iterable[Sample], pipeline: Pipeline | None = None) -> list[Finding]:
    pipeline = pipeline or Pipeline("run")
    return [finding for sample in samples for finding in pipeline.observe(sample)]


def losses(values: Iterable[float], first_step: int = 1, **more: float) -> list[Sample]:
    return [scalars(first_step + i, loss=float(value), **more) for i, value in enumerate(values)]


def healthy_loss(rng: np.random.Generator, num: int, noise: float = 0.01) -> np.ndarray:
    steps = np.arange(num)
    return (2.0 + 4.0 * np.exp(-steps / (num / 4))) * (1 + noise * rng.standard_normal(num))
