"""A save in the background copies shards to host memory, not to the device, which has no room for them.

python -m pytest tests/gpu/test_gpu_checkpoints.py -m gpu
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp

from fp8watch.checkpoints.dcp import DcpStorage
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def test_shards_are_copied_to_host_memory_and_come_back(mesh: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1024).cuda()
    dist.fsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parts = TrainingParts(model=model, optimizer=optimizer)
    storage = DcpStorage(background=True)
    held = torch.cuda.memory_allocated()
    prepared = storage.prepare(tmp_path, parts, Place())
    assert torch.cuda.memory_allocated() - held < 1024**2, "the model and its moments are 12 MiB"
    poll = prepared.begin()
    saved = [parameter.full_tensor().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    deadline = time.monotonic() + 60
    while poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    storage.load(tmp_path, parts, prepared.kept)()
    for parameter, wanted in zip(model.parameters(), saved, strict=True):
        assert torch.equal(parameter.full_tensor(), wanted)
        assert parameter.device.type == "cuda"
