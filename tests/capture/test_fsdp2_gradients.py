"""FSDP2 on one rank: gradients of sharded parameters are observed in every step, or reported as not observed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8watch.actions.clip_control import ClipControl
from fp8watch.capture import gradients
from fp8watch.capture.emulated import EmulatedSource
from fp8watch.emulation import DelayedScaling, convert

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_attached_first", [True, False])
def test_sharded_parameters(group, is_attached_first):  # case: HOK-17
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    convert(plain, recipe)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model.load_state_dict(plain.state_dict())
    convert(model, recipe)
    source = EmulatedSource(model) if is_attached_first else None
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in (model[0], model[2]):
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    source = source or EmulatedSource(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            source.begin(with_statistics=True)
            for each in (plain, model):
                each.zero_grad()
                each(x).square().mean().backward()
            reading = source.read()
            assert reading.valid["amax"].all()
            assert {column.module for column in source.columns()} == {"0", "2"}
            # Without the clipping call a sharded norm would need a collective of our own: it is said instead.
            assert gradients.total_norm(optimizer) == gradients.SHARDED
            norm = ClipControl(optimizer).clip_grad_norm_(model.parameters(), max_norm=1e9)
            by_hand = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            assert torch.allclose(norm, by_hand)
    finally:
        source.detach()
