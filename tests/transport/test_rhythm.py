"""When the transport thread looks into the queue: about once a step, without letting messages wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.transport.rhythm import LEAST_SECONDS, MOST_SECONDS, Rhythm


class Training:
    """Puts a frame into the queue at the end of each step; `run` is the transport thread, in simulated time."""

    def __init__(self, steps: list[float]) -> None:
        self.now = 0.0
        self.rhythm = Rhythm(lambda: self.now)
        ends, end = [], 0.0
        for seconds in steps:
            end += seconds
            ends.append(end)
        self.ends = ends
        self.looks: list[float] = []
        self.waits: list[float] = []
        """How long each frame was queued."""

    def run(self) -> None:
        waiting = list(self.ends)
        while waiting:
            self.looks.append(self.now)
            while waiting and waiting[0] <= self.now:
                made_at = waiting.pop(0)
                self.waits.append(self.now - made_at)
                self.rhythm.took(1e9 + made_at)
            self.now += self.rhythm.seconds()


@pytest.mark.parametrize("step", [0.076, 0.15, 0.287])
def test_it_looks_once_or_twice_a_step(step: float) -> None:
    jitter = [0.97, 1.02, 1.0, 0.99, 1.03, 0.98, 1.01]
    training = Training([step * jitter[i % 7] for i in range(300)])
    training.run()
    later = [at for at in training.looks if at > 10 * step]
    assert len(later) / 290 < 2.0 + step // MOST_SECONDS
    assert max(training.waits[10:]) <= 1.5 * LEAST_SECONDS


def test_steps_shorter_than_a_look_are_taken_together() -> None:
    training = Training([0.003] * 2000)
    training.run()
    assert len(training.looks) <= 6.0 / LEAST_SECONDS + 2
    assert max(training.waits) <= LEAST_SECONDS + 1e-9


def test_a_long_step_is_looked_for_when_it_is_due() -> None:
    training = Training([4.0] * 30)
    training.run()
    late = [at for at in training.looks if at > 40.0]
    assert len(late) / 20 <= 4.0 / MOST_SECONDS + 3, "not fifty times a second"
    assert max(training.waits[10:]) <= 2 * LEAST_SECONDS


def test_a_pause_neither_wakes_it_often_nor_makes_it_slow_afterwards() -> None:
    training = Training([0.1] * 50 + [60.0] + [0.1] * 50)
    training.run()
    in_pause = [at for at in training.looks if 7.0 < at < 64.0]
    assert len(in_pause) <= 57.0 / 0.1 + 2, "no more often than in training"
    assert max(training.waits[50:]) <= 0.1 + 1e-9, "no longer than a step"
    assert max(training.waits[60:]) <= 1.5 * LEAST_SECONDS


def test_in_a_pause_between_long_steps_it_rests() -> None:
    training = Training([4.0] * 10 + [60.0])
    training.run()
    in_pause = [at for at in training.looks if 50.0 < at < 99.0]
    assert len(in_pause) <= 49.0 / MOST_SECONDS + 2


def test_short_steps_after_a_pause_do_not_pile_up() -> None:
    training = Training(([0.005] * 50 + [10.0]) * 4)
    training.run()
    assert max(training.waits) <= LEAST_SECONDS + 1e-9


@given(st.lists(st.tuples(st.floats(), st.floats(0.0, 1e9)), max_size=30))
def test_whatever_the_frames_say_it_looks_again_soon(frames: list[tuple[float, float]]) -> None:
    """Clocks that jump, stand still, or make no sense: an exception here would end the transport."""
    now = [0.0]
    rhythm = Rhythm(lambda: now[0])
    for made_at, seconds in frames:
        rhythm.took(made_at)
        now[0] += seconds
        assert LEAST_SECONDS <= rhythm.seconds() <= MOST_SECONDS


def test_a_clock_that_is_set_back_is_no_step() -> None:
    now = [0.0]
    rhythm = Rhythm(lambda: now[0])
    for made_at in (100.0, 100.1, 50.0, 50.1, 50.2):
        now[0] += 0.1
        rhythm.took(made_at)
    assert rhythm.seconds() == pytest.approx(0.1 - LEAST_SECONDS / 2)


def test_before_the_first_step_is_known_it_looks_often() -> None:
    rhythm = Rhythm(lambda: 0.0)
    assert rhythm.seconds() == LEAST_SECONDS
    rhythm.took(100.0)
    assert rhythm.seconds() == LEAST_SECONDS
