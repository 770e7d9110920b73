"""What is not finite, in words."""

from __future__ import annotations

from typing import Any

import pytest

from fp8watch.evidence_words import not_finite, telling


@pytest.mark.parametrize(
    ("evidence", "told"),
    [
        ({"quantities": ["update_rms", "parameters"], "values": {"update_rms": "nan"}, "is_first_step": False},
         "parameters are not finite (update_rms nan)"),
        ({"quantities": ["loss", "grad_norm"], "values": {"loss": "nan", "grad_norm": "inf"}, "is_first_step": True},
         "not finite: loss nan, grad_norm inf, in the first step"),
        ({"quantities": ["parameters"], "values": {}, "is_first_step": False, "bad_before_training": ["a.weight"]},
         "parameters are not finite, before training began"),
        ({"quantities": ["scale"], "values": {}, "is_first_step": False}, "scale is not finite"),
        ({"deviation_log2": 6.0}, ""),
    ],
)  # fmt: skip
def test_it_leads_with_what_is_not_finite(evidence: dict[str, Any], told: str) -> None:
    assert not_finite(evidence) == told


def test_the_first_step_is_named_only_when_it_is_one() -> None:
    assert telling({"is_first_step": False, "loss": 1.0}) == {"loss": 1.0}
    assert telling({"is_first_step": True}) == {"is_first_step": True}
