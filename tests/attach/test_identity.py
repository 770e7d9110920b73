from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.identity import MAX_NAME_LENGTH, identify, sanitize

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "1", "SLURM_NTASKS": "4",
}  # fmt: skip


def test_alone_gets_a_name_from_date_and_chance():
    first, second = identify(environ={}), identify(environ={})
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", first.run)
    assert first.run != second.run
    assert (first.rank, first.local_rank, first.world_size) == (0, 0, 1)


def test_argument_wins_over_setting_and_setting_over_launcher():
    environ = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "job-9"}
    assert identify("mine", "set", environ).run == "mine"
    assert identify(None, "set", environ).run == "set"
    assert identify(None, None, environ).run == "job-9"


def test_torchrun():
    found = identify(environ={**TORCHRUN, "TORCHELASTIC_RUN_ID": "job-9"})
    assert (found.rank, found.local_rank, found.world_size, found.node_rank) == (5, 1, 8, 1)


def test_torchrun_without_an_id_gives_all_ranks_the_same_name():
    names = {identify(environ={**TORCHRUN, "RANK": str(r), "TORCHELASTIC_RUN_ID": "none"}).run for r in range(8)}
    other = identify(environ={**TORCHRUN, "MASTER_PORT": "2"}).run
    assert len(names) == 1
    assert other not in names


def test_kubeflow_job_name_comes_from_the_address():
    environ = {
        **TORCHRUN,
        "TORCHELASTIC_RUN_ID": "none",
        "PET_MASTER_ADDR": "llama-node-0-0.llama",
        "PET_NODE_RANK": "1",
    }
    assert identify(environ=environ).run == "llama"


def test_slurm_step_has_ranks_and_the_batch_script_none():
    found = identify(environ=SLURM_STEP)
    assert (found.run, found.rank, found.local_rank, found.world_size) == ("slurm-77.0", 3, 1, 4)
    batch = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967291"}
    alone = identify(environ=batch)
    assert (alone.run, alone.rank, alone.world_size) == ("slurm-77", 0, 1)


def test_garbage_in_the_environment_is_no_rank():
    found = identify(environ={"RANK": "zero", "WORLD_SIZE": "", "LOCAL_RANK": "-1"})
    assert (found.rank, found.world_size) == (0, 1)


@given(st.text(max_size=200))
def test_names_are_safe_for_folders_labels_and_sockets(name):
    cleaned = sanitize(name)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", cleaned)
    assert len(cleaned) <= MAX_NAME_LENGTH
    assert cleaned not in {".", ".."}


@pytest.mark.parametrize("name", ["a", "llama-8b_v2.1", "X" * MAX_NAME_LENGTH])
def test_good_names_stay(name):
    assert sanitize(name) == name
