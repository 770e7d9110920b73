"""How the model is cut up: what is read from a mesh, and what is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8watch.detect.base import Sample
from fp8watch.detect.pipeline import Pipeline
from fp8watch.records import Finding, TensorColumn
from fp8watch.training import arguments
from fp8watch.training.agreement.groups import RankGroups, read_groups
from fp8watch.training.agreement.rounds import pack_verdict, read_norms


@pytest.fixture
def rank_five() -> Iterator[None]:
    """Rank 5 of eight, whose collective calls go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def mesh(names: tuple[str, ...] | None, *sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def test_without_a_mesh_nothing_is_known() -> None:
    assert read_groups(None) == RankGroups()


def test_a_rank_outside_of_the_group_is_alone(rank_five: None) -> None:
    outside = dist.new_group([2, 3])
    assert read_groups(outside) == RankGroups()
    assert read_groups({"tp": outside}) == RankGroups()
    assert arguments._mesh(outside) is None


def test_a_mesh_of_two_dimensions_is_no_group(rank_five: None) -> None:
    assert "mesh= is not used" in read_groups({"tp": mesh(None, 2, 4)}).remark


def test_a_mesh_outside_of_a_job_is_said_not_to_be_used() -> None:
    assert "not initialised" in read_groups(object()).remark


# case: COM-05
@pytest.mark.parametrize(
    ("names", "sizes", "tensor", "stage"),
    [
        (("dp", "tp"), (4, 2), (4, 5), (0, 1)),
        (("pp", "dp", "tp"), (2, 2, 2), (4, 5), (1, 2)),
        (("tp", "dp"), (4, 2), (1, 3, 5, 7), (0, 1)),
        (("dp_replicate", "dp_shard"), (4, 2), (), (0, 1)),
        (("pp", "tp"), (8, 1), (), (5, 8)),
        (("dp", "cp", "tensor"), (2, 1, 4), (4, 5, 6, 7), (0, 1)),
    ],
)
def test_dimensions_are_known_by_their_names(
    rank_five: None, names: tuple[str, ...], sizes: tuple[int, ...], tensor: tuple[int, ...], stage: tuple[int, int]
) -> None:
    groups = read_groups(mesh(names, *sizes))
    assert (groups.tensor, (groups.stage, groups.stages), groups.remark) == (tensor, stage, "")
    assert (groups.pipeline is not None) == (groups.stages > 1)


def test_process_groups_do_as_well(rank_five: None) -> None:
    shared, stages = dist.new_group([4, 5, 6, 7]), dist.new_group([1, 5])
    assert read_groups(shared).tensor == (4, 5, 6, 7)
    both = read_groups({"tp": shared, "pp": stages, "ep": stages})
    assert (both.tensor, both.stage, both.stages, both.pipeline) == ((4, 5, 6, 7), 1, 2, stages)
    assert "ep" in both.remark
    assert read_groups({"tp": mesh(("tp",), 8)}).tensor == tuple(range(8))


@pytest.mark.parametrize(
    "made", [lambda: mesh(None, 8), lambda: 7, lambda: {"tp": 7}, lambda: mesh(("pp", "pipe"), 4, 2)]
)
def test_what_cannot_be_used_is_said(rank_five: None, made: Any) -> None:
    groups = read_groups(made())
    assert groups.remark.startswith("mesh")
    assert (groups.tensor, groups.stages) == ((), 1)


NORMS = st.floats(min_value=0.0, width=64, allow_nan=False)


@given(st.lists(NORMS, min_size=2, max_size=5), st.integers(1, 3))
def test_norms_of_stages_come_through_a_minimum(norms: list[float], replicas: int) -> None:
    """Whatever else the ranks of a verdict say; infinity too."""
    said = [
        pack_verdict(norm=(stage, norm), stages=len(norms)) for stage, norm in enumerate(norms) for _ in range(replicas)
    ]
    assert read_norms([min(column) for column in zip(*said, strict=True)]) == norms


def test_a_stage_that_nobody_spoke_for_and_one_that_is_nan_are_not_taken_for_numbers() -> None:
    said = [pack_verdict(norm=(0, math.nan), stages=3), pack_verdict(norm=(1, 2.0), stages=3)]
    first, second, third = read_norms([min(column) for column in zip(*said, strict=True)])
    assert math.isnan(first)
    assert second == 2.0
    assert math.isnan(third)
    assert len(pack_verdict(left=2)) == 3


def findings(
    of: str, values: list[dict[int, float]], groups: tuple[tuple[int, ...], ...], recipe: str
) -> list[Finding]:
    """What is found in steps of four ranks with these checksums."""
    pipeline, found = Pipeline("r"), list[Finding]()
    columns = tuple(
        TensorColumn(module="up", tensor=tensor, block="0", fp8_format="E4M3", recipe=recipe)
        for tensor in ("input", "weight")
    )
    for step, checksums in enumerate(values, 1):
        found += pipeline.observe(
            Sample(
                attempt=0, step=step, scalars={"loss": 2.0 + step % 7 / 100, "grad_norm": 1.0 + step % 5 / 50},
                tensors=columns, num_ranks=4, expected_ranks=4, rank_values={of: checksums}, tensor_groups=groups,
            )
        )  # fmt: skip
    return [finding for finding in found if finding.detector == "rank_mismatch"]


# case: COM-05
@pytest.mark.parametrize(
    ("of", "recipe", "severity"),
    [
        ("scale_checksum", "delayed", "warn"),
        ("scale_checksum", "current", ""),
        ("precision_checksum", "current", "act"),
    ],
)
def test_ranks_declared_to_share_tensors_have_to_agree(of: str, recipe: str, severity: str) -> None:
    """Both ranks are named. Ranks of different groups may differ, and without a history a slice has its own scale."""
    values = [{0: 32.0, 1: 64.0, 2: 7.0 + step, 3: 7.0 + step} for step in range(6)]
    found = findings(of, values, ((0, 1), (2, 3)), recipe)
    assert [(f.severity, f.cause, f.onset_step, f.evidence["ranks"]) for f in found] == (
        [(severity, "bookkeeping", 1, [0, 1])] if severity else []
    )
    assert findings(of, values, (), recipe) == []


def test_one_step_apart_is_not_enough_and_no_observation_is_none() -> None:
    same, apart, unseen = {0: 1.0, 1: 1.0}, {0: 1.0, 1: 2.0}, dict[int, float]()
    for steps in ([same, apart, same, apart, same], [apart, same, same], [same, unseen, unseen, unseen]):
        assert findings("scale_checksum", steps, ((0, 1),), "delayed") == []
    (found,) = findings("scale_checksum", [same, apart, unseen, apart], ((0, 1),), "delayed")
    assert (found.onset_step, found.step) == (2, 4)
