"""A precision action that has nothing to gain is passed over, if closer looks have shown it."""

from __future__ import annotations

import pytest

from fp8watch.formats import E4M3
from fp8watch.policy.decide import decide
from fp8watch.policy.load import parse
from fp8watch.policy.state import PolicyState
from fp8watch.policy.view import Trouble, View
from fp8watch.what_if import CANDIDATES, Comparison, Loss

FINE = Loss(underflow=1e-5, saturation=0.0, snr_db=31.5)
CLIPPED = Loss(underflow=1e-5, saturation=0.18, snr_db=11.6)
POLICY = """
version: 1
mode: auto
rules:
  - name: clipping
    when: {detector: [saturation, loss_spike]}
    ladder:
      - {action: raise_margin, bits: 1}
      - {action: bf16_layers, max_share: 1.0}
      - {action: hold_lr, factor: 0.5}
"""


def compared(as_is: Loss, *, step: int = 50, **under: Loss) -> Comparison:
    return Comparison(step=step, as_is=as_is, under={name: under.get(name, as_is) for name in CANDIDATES}, fmt=E4M3)


def chosen(what_if: dict[str, Comparison], tensors: tuple[str, ...] = ("fc:input",), policy: str = POLICY):
    trouble = Trouble(
        incident="i", detector="saturation", cause="precision", severity="act", onset_step=48, first_step=50,
        last_seen_step=50, layers=("fc",), tensors=tensors,
    )  # fmt: skip
    view = View(
        run="r", step=50, seen=50, troubles=(trouble,), modules=("fc", "head"), tensors=("fc:input", "fc:weight"),
        what_if=what_if,
    )  # fmt: skip
    _, decisions = decide(parse(policy, "p"), PolicyState(), view)
    passed = {decision.action: decision.reason for decision in decisions if decision.kind == "record"}
    (ordered,) = (decision for decision in decisions if decision.kind == "apply")
    return ordered, passed


def test_without_figures_the_first_rung_is_taken():
    assert chosen({})[0].action == "raise_margin"


def test_a_margin_that_helps_is_taken_and_says_why():
    ordered, _ = chosen({"fc:input": compared(CLIPPED, margin_1=FINE)})
    assert ordered.action == "raise_margin"
    assert "18.00% saturation" in ordered.reason
    assert "31.5 dB with the margin" in ordered.reason


def test_a_margin_without_gain_is_passed_over():
    ordered, passed = chosen({"fc:input": compared(CLIPPED)})
    assert ordered.action == "bf16_layers"
    assert "no gain" in passed["raise_margin"]
    assert "fc:input, step 50" in passed["raise_margin"]


def test_where_every_cast_is_ordinary_precision_is_not_changed_at_all():
    ordered, passed = chosen({"fc:input": compared(FINE)})
    assert ordered.action == "hold_lr"
    assert set(passed) == {"raise_margin", "bf16_layers"}


@pytest.mark.parametrize(
    ("what_if", "tensors"),
    [
        ({"fc:input": compared(FINE, step=47)}, ("fc:input",)),  # from before the onset
        ({"fc:input": compared(FINE)}, ("fc:input", "fc:weight")),  # of one of two
        ({"fc:input": compared(FINE), "fc:weight": compared(FINE, step=3)}, ("fc:input", "fc:weight")),
        ({"fc:input": compared(FINE)}, ()),  # no tensor is named
    ],
)
def test_figures_that_do_not_cover_the_trouble_hold_nothing_back(what_if, tensors):
    assert chosen(what_if, tensors)[0].action == "raise_margin"


def test_one_tensor_that_gains_is_enough():
    figures = {"fc:input": compared(FINE), "fc:weight": compared(CLIPPED, margin_1=FINE)}
    assert chosen(figures, ("fc:input", "fc:weight"))[0].action == "raise_margin"


def test_the_precondition_can_be_switched_off():
    policy = POLICY.replace("bits: 1", "bits: 1, if_what_if_helps: false")
    assert chosen({"fc:input": compared(FINE)}, policy=policy)[0].action == "raise_margin"
