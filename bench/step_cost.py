"""What watching costs the training thread a step, and how many torch calls it makes: no GPU needed.

    python bench/step_cost.py [--layers 16] [--rounds 9] [--profile]

A double of Transformer Engine's delayed scaling (modules with its state, its update called once a direction) trains a
model of the launch-bound shape's layers and names, tiny in every other way. Measured are the CPU time of the training
thread inside fp8watch (`time.thread_time_ns`; the tap of the backward, which runs on autograd's thread in a real run,
included), and the calls into ATen that a watched step makes and a bare one does not: each launches one kernel or copy
on a GPU, or a few, and costs 4 to 10 us of host time there.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from capture_cost import measure_cpu
from torch.utils._python_dispatch import TorchDispatchMode

UPDATE = "fused_amax_and_scale_update_after_reduction"
KINDS = {"qkv": 1, "proj": 1, "mlp": 2}
"""Modules with FP8 state in a TransformerLayer, and their GEMMs."""


class LayerNormMLP(torch.nn.Module):
    """A module with TE's delayed-scaling state; `gemms` of them are named as TE names them."""

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


class Training:
    """The loop of the README; the model's own work is one sum."""

    def __init__(self, layers: int) -> None:
        self.library = SimpleNamespace(**{UPDATE: lambda *_: None})
        blocks = [torch.nn.ModuleDict({name: LayerNormMLP(n) for name, n in KINDS.items()}) for _ in range(layers)]
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
            getattr(self.library, UPDATE)(amax, None, scales)
        loss = torch.rand(())
        parameters = list(self.model.parameters())
        clip = torch.nn.utils.clip_grad_norm_ if watch is None else watch.clip_grad_norm_
        clip(parameters, 1.0)
        self.optimizer.step()
        if watch is not None:
            watch.step(loss)


class Calls(TorchDispatchMode):
    """Counts what reaches ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def attach(training: Training, run: str) -> Any:
    """A watch on the double: no library is there for `sources.find` to recognise."""
    import fp8watch
    from fp8watch.capture import sources
    from fp8watch.capture.te_source import TeSource
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
    """Calls of one step that do something on a device."""
    with Calls() as mode:
        training.step(watch)
    return [name for name in mode.names if name.split(".")[1] not in VIEWS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    os.environ |= {
        "FP8WATCH_DIR": str(folder), "FP8WATCH_AGENT": f"unix://{folder}/nobody.sock", "FP8WATCH_REPORT": "0",
        "FP8WATCH_STATISTICS_EVERY": "1000000", "FP8WATCH_SHADOW_EVERY": "0", "FP8WATCH_WHAT_IF_EVERY": "0",
    }  # fmt: skip
    training = Training(chosen.layers)
    training.step(None)
    bare = count(training, None)
    watch = attach(training, "calls")
    for _ in range(5):
        training.step(watch)
    watched = count(training, watch)
    if chosen.profile:
        profile(training, watch)
    watch.detach()
    rounds = [measure_cpu(training, attach(training, f"r{i}"), lambda: None)["cpu_us"] for i in range(chosen.rounds)]
    extra = {name: n for name in sorted(set(watched)) if (n := watched.count(name) - bare.count(name))}
    print(", ".join(f"{name.removeprefix('aten.')} {n}" for name, n in extra.items()))
    num_modules = len(training.scales["scaling_fwd"])
    print(
        f"{num_modules} modules: {statistics.median(rounds):.0f} us of the training thread's CPU a step"
        f" (least of {len(rounds)} rounds {min(rounds):.0f}), {len(watched) - len(bare)} torch calls"
    )
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
