"""Two process groups for one role are refused at attach by name, and never the last one taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8watch
from fp8watch.errors import Refused


@pytest.fixture
def groups() -> Iterator[tuple[Any, Any, Any]]:
    """Of rank 0 of four: two groups that it is in, and one that it is not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.new_group([0, 1]), dist.new_group([0, 2]), dist.new_group([2, 3])
    dist.destroy_process_group()


def refused(mesh: Any) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Refused) as caught:
        fp8watch.attach(model, optimizer, mesh=mesh, run="r")
    assert "step" not in vars(optimizer)
    (problem,) = caught.value.problems
    return problem.split(": ", 1)[1]


def test_both_names_are_said(groups: tuple[Any, Any, Any]) -> None:
    first, second, _ = groups
    assert refused({"pp": first, "pipe": second}) == (
        "mesh: 'pp' and 'pipe' both name the ranks that are the stages of a pipeline: one of them is wanted"
    )
    assert "'tp' and 'model' both name the ranks that share tensors" in refused({"tp": first, "model": second})
    assert "'pp' and 'pipe'" in refused({"tp": first, "pp": first, "pipe": first}), "the same group twice, too"


def test_one_of_each_role_and_one_that_this_rank_is_not_in_are_taken(groups: tuple[Any, Any, Any]) -> None:
    from fp8watch.training import arguments

    first, second, outside = groups
    for mesh in ({"tp": first, "pp": second}, {"pp": first, "pipe": None}, {"pp": outside, "pipe": first}, {3: first}):
        assert arguments._mesh(mesh) is None


def test_a_mapping_that_cannot_be_read_is_named() -> None:
    class Broken(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise OSError("gone")

        def __iter__(self) -> Iterator[str]:
            return iter(["tp"])

        def __len__(self) -> int:
            return 1

    assert refused(Broken()) == "mesh: its items cannot be read (OSError: gone)"
