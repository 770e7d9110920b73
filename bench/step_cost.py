"""What watching costs the training thread per step, and how many torch calls it makes: needs no GPU.

    python bench/step_cost.py [--layers 24 84] [--rounds 9] [--profile] [--out bench/results/step_cost.json]

A double of Transformer Engine's delayed scaling (modules with its state, whose update is called once per direction)
trains a model with the modules and names of a TransformerLayer, tiny in every other way; 84 layers are 2,184 tensors.
Measured:

- the CPU time of the training thread inside fp8watch (`time.thread_time_ns`) in that loop, whose clipping and optimizer
  evict everything else from the caches, as a real step does; the tap of the backward, which in a real run is on
  autograd's thread, is included;
- the same with caches that hold nothing of ours, which is what a large training leaves: closest to a GPU's host;
- the same for fp8watch's calls alone, over and over: what its code costs when nothing is in its way;
- the calls into ATen that a watched step makes and a bare one does not: on a GPU each launches one kernel or copy, or a
  few, and costs 4 to 10 us of host time;
- what counting one cast costs its thread on a sampled step, without the kernel's launch: in a row, and with caches
  that hold nothing of it.

Clock frequency, neighbours and caches change the first figure by half: compare only runs on one machine.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import os
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from capture_cost import measure_cpu
from result_head import as_text, head
from torch.utils._python_dispatch import TorchDispatchMode

UPDATE = "fused_amax_and_scale_update_after_reduction"
MOST_CPU_US = 400.0
ALONE_STEPS, CASTS = 1000, 192
EVICTED_BYTES = 64 * 1024**2
"""Read between two casts, or two parts of a step, this evicts everything else from the caches."""
KINDS = {"qkv": 1, "attention": 3, "proj": 1, "mlp": 2}
"""Modules with FP8 state in a TransformerLayer -> number of their GEMMs."""


class LayerNormMLP(torch.nn.Module):
    """A module with TE's delayed-scaling state for `gemms` GEMMs, named as in TE."""

    recipe = SimpleNamespace(margin=0, amax_compute_algo="max", fp8_format="Format.HYBRID")

    def __init__(self, gemms: int) -> None:
        super().__init__()
        self.fp8 = True
        self.weight = torch.nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
        self.norm_weight = torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
        self.norm_bias = torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
        self.fp8_meta = {"recipe": self.recipe} | {
            key: SimpleNamespace(scale=torch.ones(n * gemms), amax_history=torch.zeros(16, n * gemms))
            for key, n in (("scaling_fwd", 3), ("scaling_bwd", 2))
        }


class DotProductAttention(LayerNormMLP):
    """Attention outside FP8: Transformer Engine updates its 15 slots all the same, and nine of them have no meaning."""


class Training:
    """The loop of the README; the model's own work is a single sum."""

    def __init__(self, layers: int) -> None:
        self.evicted: Any | None = None
        """An array that is read before each part of a step, so that nothing else is left in the caches."""
        self.library = SimpleNamespace(**{UPDATE: lambda *_: None})
        blocks = [torch.nn.ModuleDict({name: _module(name, n) for name, n in KINDS.items()}) for _ in range(layers)]
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        modules = [module for block in blocks for module in block.values()]
        self.scales = {
            key: [module.fp8_meta[key].scale for module in modules] for key in ("scaling_fwd", "scaling_bwd")
        }
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    def step(self, watch: Any | None) -> None:
        """One optimizer step."""
        for scales in self.scales.values():
            amax = torch.rand(sum(scale.numel() for scale in scales))
            self._evict()
            getattr(self.library, UPDATE)(amax, None, scales)
        loss = torch.rand(())
        parameters = list(self.model.parameters())
        clip = torch.nn.utils.clip_grad_norm_ if watch is None else watch.clip_grad_norm_
        self._evict()
        clip(parameters, 1.0)
        self._evict()
        self.optimizer.step()
        self._evict()
        if watch is not None:
            watch.step(loss)

    def _evict(self) -> None:
        if self.evicted is not None:
            self.evicted.sum()


def _module(name: str, gemms: int) -> LayerNormMLP:
    return (DotProductAttention if name == "attention" else LayerNormMLP)(gemms)


class Calls(TorchDispatchMode):
    """Counts the calls that reach ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def attach(training: Training, run: str) -> Any:
    """A watch on the double: `sources.find` would not recognise it, because the library is not there."""
    import fp8watch
    from fp8watch.capture import sources
    from fp8watch.capture.te.source import TeSource
    from fp8watch.training.recorder import UPDATE_EVERY

    original = sources.find
    sources.find = lambda model: sources.Found(
        sources=[TeSource(model, extension=training.library)], framework="Transformer Engine"
    )
    try:
        watch = fp8watch.attach(training.model, training.optimizer, run=run)
        watch._recorder._update_every = UPDATE_EVERY  # as on an accelerator
        return watch
    finally:
        sources.find = original


VIEWS = ("view", "slice", "detach", "reshape", "alias", "as_strided", "select", "split", "unsqueeze", "_to_copy.noop")


def count(training: Training, watch: Any | None) -> list[str]:
    """The calls of one step that do something on a device."""
    with Calls() as mode:
        training.step(watch)
    return [name for name in mode.names if name.split(".")[1] not in VIEWS]


def measure_alone(training: Training, watch: Any) -> float:
    """Median microseconds per step of only the calls that a loop makes."""
    from fp8watch.actions import clip_control

    amaxes = {key: torch.rand(sum(scale.numel() for scale in scales)) for key, scales in training.scales.items()}
    parameters, loss, norm = list(training.model.parameters()), torch.rand(()), torch.rand((), dtype=torch.bfloat16)
    recorder, update = watch._recorder, getattr(training.library, UPDATE)
    clip, clip_control.torch_clip_grad_norm_ = clip_control.torch_clip_grad_norm_, lambda *_: norm
    spent = []
    try:
        for _ in range(ALONE_STEPS):
            started = time.thread_time_ns()
            for key, scales in training.scales.items():
                update(amaxes[key], None, scales)
            watch.clip_grad_norm_(parameters, 1.0)
            recorder.before_update(has_closure=False)
            recorder.enter_update()
            recorder.leave_update()
            recorder.after_update(has_closure=False)
            watch.step(loss)
            spent.append((time.thread_time_ns() - started) / 1e3)
    finally:
        clip_control.torch_clip_grad_norm_ = clip
    return statistics.median(spent[ALONE_STEPS // 10 :])


class _Kernel:
    """Replaces the kernel that counts a cast: its launch is not measured here, only what leads to it."""

    PROGRAMS = 1

    @staticmethod
    def add(row: Any, values: torch.Tensor, codes: torch.Tensor, inverse: torch.Tensor, **options: Any) -> bool:
        from fp8watch.capture.triton_launch import Shortcut

        # `str.format` stands for the C function: it takes any arguments. `torch.get_num_threads` for the device.
        shortcut = Shortcut(
            "".format, 1, 0, False, False, (8, 1, 0), torch.get_num_threads(), torch.get_num_threads, abs
        )  # fmt: skip
        row.last = (shortcut, values.dtype, options["code"])
        return True


def measure_casts(*, casts: int = CASTS, steps: int = 60, evicted: Any | None = None) -> float:
    """Microseconds per cast on a sampled step, as inside an autograd function; the median over steps.

    `evicted`: an array that is read before each cast, so that nothing of ours is left in the caches, as after the
    real operations between two casts. Then the median over casts, without what an unwatched cast costs there.
    """
    from fp8watch.capture.cost_meter import CostMeter
    from fp8watch.capture.te.statistics import TeStatistics

    source = torch.randn(8, 8)
    made = SimpleNamespace(
        _data=torch.zeros(8, 8, dtype=torch.uint8), _scale_inv=torch.ones(1), _fp8_dtype="kFloat8E4M3"
    )  # fmt: skip
    extension = SimpleNamespace(quantize=lambda tensor, quantizer: made)
    model = torch.nn.ModuleList(LayerNormMLP(1) for _ in range(casts // 3))
    quantizers = [SimpleNamespace(scale=one) for module in model for one in module.fp8_meta["scaling_fwd"].scale]
    for module, i in zip(model, range(0, casts, 3), strict=True):
        module.quantizers = {"scaling_fwd": quantizers[i : i + 3]}
    counting = TeStatistics(model, extension=extension)
    counting._kernel = _Kernel
    counting._is_capturing = torch.is_grad_enabled  # on a GPU a C function too; False here
    kinds: Any = ("statistics", "what_if", "shadow")
    counting.meters = {kind: CostMeter(torch.device("cpu")) for kind in kinds}
    spent, bare = [], []
    with torch.no_grad():
        for _ in range(steps):
            counting.begin(is_sampled=False)
            bare += time_casts(extension, source, quantizers, evicted) if evicted is not None else []
            counting.begin(is_sampled=True)
            found = time_casts(extension, source, quantizers, evicted)
            spent.append(statistics.mean(found) if evicted is None else statistics.median(found))
            assert counting.rows is not None
            assert [row.elements for row in counting.rows] == [64] * casts  # every one was counted
            assert all(row.last is not None for row in counting.rows)  # after the first step, the short way
            counting.add_to(None, list)
            for meter in counting.meters.values():
                meter.close_step()
                list(meter.take())
    counting.detach()
    warm = spent[min(5, steps // 3) :]
    return statistics.median(warm) - (statistics.median(bare) if bare else 0.0)


def time_casts(extension: Any, source: torch.Tensor, quantizers: list[Any], evicted: Any | None) -> list[float]:
    """Microseconds of each cast; without evicting anything, the mean of all, which asks the clock only twice."""
    if evicted is None:
        started = time.thread_time_ns()
        for quantizer in quantizers:
            extension.quantize(source, quantizer)
        return [(time.thread_time_ns() - started) / 1e3 / len(quantizers)]
    found = []
    for quantizer in quantizers:
        evicted.sum()
        started = time.thread_time_ns()
        extension.quantize(source, quantizer)
        found.append((time.thread_time_ns() - started) / 1e3)
    return found


def measure(layers: int, rounds: int, *, is_profiled: bool) -> dict[str, Any]:
    """The row of one shape."""
    training = Training(layers)
    training.step(None)
    bare = count(training, None)
    watch = attach(training, f"calls-{layers}")
    for _ in range(5):
        training.step(watch)
    watched = count(training, watch)
    if is_profiled:
        profile(training, watch)
    num_tensors = len(watch._recorder.layout.columns)
    alone = measure_alone(training, watch)
    watch.detach()
    runs = [measure_cpu(training, attach(training, f"{layers}-{i}"), lambda: None)["cpu_us"] for i in range(rounds)]
    training.evicted = np.ones(EVICTED_BYTES // 8)
    cold = [
        measure_cpu(training, attach(training, f"cold-{layers}-{i}"), lambda: None)["cpu_us"] for i in range(rounds)
    ]
    extra = {name: n for name in sorted(set(watched)) if (n := watched.count(name) - bare.count(name))}
    return {
        "name": "training thread", "shape": f"{layers} layers, {num_tensors} tensors",
        "cpu_us": statistics.median(runs), "least_us": min(runs), "alone_us": alone,
        "cold_us": statistics.median(cold), "torch_calls": extra,
        "bar": MOST_CPU_US, "pass": statistics.median(cold) <= MOST_CPU_US, "raw": {"cpu_us": runs, "cold_us": cold},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 84])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--out", type=Path, help="write the result there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    os.environ |= {
        "FP8WATCH_DIR": str(folder), "FP8WATCH_AGENT": f"unix://{folder}/nobody.sock", "FP8WATCH_REPORT": "0",
        "FP8WATCH_STATISTICS_EVERY": "1000000", "FP8WATCH_SHADOW_EVERY": "0", "FP8WATCH_WHAT_IF_EVERY": "0",
        "FP8WATCH_QUEUE_FRAMES": "16",  # soon full, as in a long run: every frame replaces an old one
    }  # fmt: skip
    logging.disable(logging.WARNING)  # there is no agent, and the transport says so
    rows = []
    for layers in chosen.layers:
        row = measure(layers, chosen.rounds, is_profiled=chosen.profile)
        rows.append(row)
        calls = ", ".join(f"{name.removeprefix('aten.')} {n}" for name, n in row["torch_calls"].items())
        print(
            f"{row['shape']}: {row['cpu_us']:.0f} us of the training thread's CPU a step (least of {chosen.rounds}"
            f" rounds {row['least_us']:.0f}; alone {row['alone_us']:.0f}; cold {row['cold_us']:.0f}),"
            f" torch calls: {calls}"
        )
    cast_us, cold_us = measure_casts(), measure_casts(casts=48, steps=6, evicted=np.ones(EVICTED_BYTES // 8))
    rows.append(
        {"name": "a counted cast, without its kernel", "shape": f"{CASTS} casts", "cpu_us": cast_us, "cold_us": cold_us}
    )
    print(f"a counted cast: {cast_us:.1f} us without its kernel, {cold_us:.1f} us with nothing of it in the caches")
    if chosen.out is not None:
        result = head(torch=torch.__version__) | {"rows": rows}
        chosen.out.write_text(as_text(result))
    return 0


def profile(training: Training, watch: Any) -> None:
    """The functions that cost most."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(300):
        training.step(watch)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(r"fp8watch|_foreach|built-in|method", 60)


if __name__ == "__main__":
    sys.exit(main())
