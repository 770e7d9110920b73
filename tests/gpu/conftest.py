"""GPU tests: unrelated warnings of libraries are not errors, and no test leaves a mode behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8watch.capture.te.source import TeSource

QUIET = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Torch and Transformer Engine warn of themselves while they are imported, compiled and captured."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        for text in QUIET:
            item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True)
def _asynchronous() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def watching() -> Iterator[Any]:
    """Makes sources of Transformer Engine's models, which leave at the test's end."""
    made: list[TeSource] = []

    def watch(model: torch.nn.Module) -> TeSource:
        made.append(TeSource(model))
        return made[-1]

    yield watch
    for source in made:
        source.detach()
