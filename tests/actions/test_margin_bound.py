"""No remedy takes the margin to where nothing of the range is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import TinyRun

from fp8watch.errors import ActionError
from fp8watch.formats import MAX_MARGIN


def test_margins_add_up_to_the_bound_and_no_further(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    controls = run.context.controls
    assert controls is not None
    run.step()
    for _ in range(2):
        run.apply("raise_margin", bits=8.0)
    assert controls.margin() == MAX_MARGIN
    with pytest.raises(ActionError, match="the margin is 16; with 1 more there would be no range left"):
        run.apply("raise_margin", bits=1.0)
    assert controls.margin() == MAX_MARGIN
    run.step()
