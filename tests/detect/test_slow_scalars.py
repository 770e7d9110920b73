"""clip_rate, zero_grad, no_progress, attention_logit and shadow_error: what they find and where they stay silent."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import columns, drive, findings, scalars

from fp8watch.detect.attention_logit import AttentionLogit
from fp8watch.detect.base import Sample
from fp8watch.detect.clip_rate import ClipRate
from fp8watch.detect.no_progress import NoProgress
from fp8watch.detect.shadow_error import ShadowError
from fp8watch.detect.zero_grad import ZeroGrad


def clipping(shares: list[tuple[int, float]], seed: int = 0) -> list[Sample]:
    """Stretches of (steps, share of them that is clipped)."""
    rng = np.random.default_rng(seed)
    flags = [rng.random() < share for steps, share in shares for _ in range(steps)]
    return [scalars(i + 1, grad_norm=2.0 if flag else 0.5, clip_limit=1.0) for i, flag in enumerate(flags)]


def test_a_clip_rate_that_rises_for_good_is_warned_of() -> None:  # case: SPK-18
    found = drive(ClipRate(), clipping([(900, 0.004), (600, 0.3)]))
    assert {s.severity for s in found} == {"warn"}
    assert 920 < found[0].step < 1000
    assert found[-1].evidence["is_severe"]


@pytest.mark.parametrize("shares", [[(2000, 0.004)], [(2000, 1.0)], [(600, 1.0), (1400, 0.02)], [(2000, 0.03)]])
def test_a_steady_or_falling_clip_rate_is_nothing(shares: list[tuple[int, float]]) -> None:
    assert drive(ClipRate(), clipping(shares)) == []


def test_zero_gradients_three_times_as_many_as_at_best() -> None:
    rng = np.random.default_rng(0)
    share = np.concatenate([np.full(400, 0.02), np.linspace(0.02, 0.07, 400)]) * (1 + 0.1 * rng.standard_normal(800))
    found = drive(ZeroGrad(), [scalars(i + 1, zero_grad_ratio=float(v)) for i, v in enumerate(share)])
    assert {s.severity for s in found} == {"warn"}
    assert 500 < found[0].step < 700
    assert found[-1].evidence["is_severe"]
    steady = [
        scalars(i + 1, zero_grad_ratio=float(v)) for i, v in enumerate(0.4 * (1 + 0.1 * rng.standard_normal(900)))
    ]
    assert drive(ZeroGrad(), steady) == []


def test_a_loss_scale_that_halves_at_every_step_is_warned_of_with_what_is_left() -> None:  # case: SPK-23
    healthy = [scalars(i, loss_scale=65536.0, update_skipped=0.0) for i in range(1, 101)]
    falling = [scalars(100 + k, loss_scale=65536.0 / 2**k, update_skipped=1.0) for k in range(1, 17)]
    found = drive(NoProgress(), healthy + falling)
    assert (found[0].step, found[0].severity, found[0].onset_step) == (104, "warn", 101)
    assert found[0].evidence["minimum_in_steps"] == 12
    (finding,) = [f for f in findings(healthy + falling) if f.detector == "no_progress"]
    assert finding.severity == "warn"


def test_a_healthy_scaler_that_halves_and_doubles_is_not() -> None:  # case: SPK-23
    scale, samples = 65536.0 * 64, []
    for step in range(1, 3000):
        is_skipped = step <= 7 or step % 200 == 0
        scale = scale / 2 if is_skipped else scale * 2 if step % 200 == 100 else scale
        samples.append(scalars(step, loss_scale=scale, update_skipped=float(is_skipped)))
    assert drive(NoProgress(), samples) == []


def test_updates_that_are_always_skipped_are_no_progress() -> None:
    samples = [scalars(i, update_skipped=float(i > 50)) for i in range(1, 70)]
    assert drive(NoProgress(), samples)[0].step == 58


def logits(values: list[float], module: str = "") -> list[Sample]:
    name = "attention_logit_max" + (f":{module}" if module else "")
    return [scalars(i + 1, **{name: value}) for i, value in enumerate(values)]


def test_attention_logits_that_grow_are_acted_on_and_a_steady_level_is_not() -> None:
    growing = [20.0 * 1.01**i for i in range(400)]
    found = drive(AttentionLogit(), logits(growing, "blocks.3.attention"))
    acts = [s for s in found if s.severity == "act"]
    assert found[0].severity == "warn"
    assert growing[acts[0].step - 1] < 160
    assert acts[0].modules == ("blocks.3.attention",)
    assert {s.severity for s in drive(AttentionLogit(), logits([120.0] * 600))} == {"warn"}
    assert drive(AttentionLogit(), logits([30.0, 70.0] + [30.0] * 200)) == []
    assert [s.severity for s in drive(AttentionLogit(), logits([2000.0] * 3))] == ["act"]
    finding = next(f for f in findings(logits(growing, "blocks.3.attention")) if f.severity == "act")
    assert (finding.layer, finding.cause) == ("blocks.3.attention", "optimisation")


def probes(errors: list[float], row: int = 0) -> list[Sample]:
    tensors = columns()
    made = []
    for i, error in enumerate(errors):
        valid = np.zeros(len(tensors), np.bool_)
        valid[row] = True
        made.append(
            Sample(
                attempt=0, step=10 * (i + 1), scalars={}, tensors=tensors,
                values={"shadow_error": np.full(len(tensors), error, np.float32)}, valid={"shadow_error": valid},
            )
        )  # fmt: skip
    return made


def test_a_gemm_that_is_off_is_found_and_an_ordinary_one_is_not() -> None:
    assert drive(ShadowError(), probes([0.037, 0.042, 0.04] * 30)) == []
    assert drive(ShadowError(), probes([0.037, 0.2, 0.037])) == []
    found = drive(ShadowError(), probes([0.037, 0.17, 0.17, 1.7]))
    assert [(s.severity, s.step, s.onset_step) for s in found] == [("warn", 30, 20), ("act", 40, 20)]
    assert drive(ShadowError(), probes([float("nan")] * 3))[-1].severity == "act"
    (finding,) = [f for f in findings(probes([0.17] * 4)) if f.severity == "act"]
    assert (finding.layer, finding.cause) == ("blocks.0.mlp.down", "precision")


def test_a_ratio_that_hovers_at_its_limit_is_one_incident() -> None:  # case: NUM-25
    """Counts are exact integers; 5 % is the saturation detector's limit, and 8 steps its memory."""
    tensors, rng = columns(), np.random.default_rng(0)
    samples = []
    for step in range(1, 400):
        saturated = np.full(len(tensors), 2**40 // 20 + int(rng.integers(-2_000_000, 2_000_000)), np.uint64)
        values = {
            "amax": np.full(len(tensors), 2.5 * 448, np.float32), "scale": np.ones(len(tensors), np.float32),
            "quantized": np.full(len(tensors), 2**40, np.uint64), "saturated": saturated,
        }  # fmt: skip
        samples.append(Sample(attempt=0, step=step, scalars={}, tensors=tensors[:6], values=values))
    found = [f for f in findings(samples) if f.detector == "saturation" and f.severity == "act"]
    assert len(found) == 1
