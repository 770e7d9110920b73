"""One rank of the amax-reduction test: prints scales as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from fp8watch.emulation import DelayedScaling, convert


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    calls = 0
    reduce = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return reduce(*args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = counted  # type: ignore[assignment]
    result: dict[str, object] = {}
    for name, reduces in (("reduced", True), ("local", False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        convert(model, DelayedScaling(reduce_amax=reduces, amax_compute_algo="most_recent"))
        calls = 0
        for step in range(2):
            x = torch.ones(4, 16) * (1 + 3 * rank)
            if step == 1 and rank == 1:  # this rank's first layer gets nothing to do: still the same reduction
                model[0].forward = lambda x: x
            model(x).sum().backward()
        result[name] = {"calls": calls, "scales": [layer.scaling_forward.scale.tolist() for layer in model]}
        result[name]["backward"] = [layer.scaling_backward.scale.tolist() for layer in model]
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
