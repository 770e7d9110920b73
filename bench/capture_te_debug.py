"""Cost of TE's own debug features on the same training: a separate program, started by `capture.py`.

    python bench/capture_te_debug.py SHAPE STEPS

The features have to be initialised before the first layer is built. One step in ten logs what fp8watch counts on its
sampled steps (underflow, overflow, MSE, scales; amax) for activations, weights and gradients. Every step is timed
between two synchronisations. Prints one JSON line: milliseconds of each step, and which steps logged.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from capture_training import SHAPES, TransformerEngine

EVERY = 10


def main() -> int:
    name, steps = sys.argv[1], int(sys.argv[2])
    import nvdlfw_inspect.api as debug
    import transformer_engine

    tensors = ["activation", "weight", "gradient"]
    common = {"enabled": True, "tensors": tensors, "freq": EVERY}
    fp8 = {**common, "stats": ["underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max"]}
    features = {"LogFp8TensorStats": fp8, "LogTensorStats": {**common, "stats": ["cur_amax"]}}
    everything = {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": features}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"everything": everything}))  # JSON is YAML
        home = Path(transformer_engine.__file__).parent
        debug.initialize(
            config_file=str(config), feature_dirs=[str(home / "debug" / "features")], log_dir=folder,
            default_logging_enabled=True,
        )  # fmt: skip
        training = TransformerEngine(**SHAPES[name])
        times: list[float] = []
        for _ in range(steps):
            torch.cuda.synchronize()
            started = time.perf_counter()
            training.step(None)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
            debug.step()
        debug.end_debug()
    print(json.dumps({"ms": times, "logged": [step % EVERY == 0 for step in range(steps)]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
