"""Frames are kept for their time by the agent's own clock, whatever becomes of the clock of Redis' machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch_agent.trim import EVERY_SECONDS, Ages, parse

START = 1_700_000_000.0
KEEP = 600.0


class Stream:
    """A stream with an entry a second, as Redis names them, and the agent that sends and trims."""

    def __init__(self) -> None:
        self.now = 0.0
        self.redis_ahead = 0.0
        self.ages = Ages(lambda: self.now)
        self.made: dict[tuple[int, int], float] = {}

    @property
    def redis_seconds(self) -> float:
        return START + self.now + self.redis_ahead

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            newest = max(self.made, default=(0, 0))
            at = int(self.redis_seconds * 1000)
            name = (at, 0) if at > newest[0] else (newest[0], newest[1] + 1)  # as Redis does when its clock is set back
            self.made[name] = self.now
            self.ages.sent(f"{name[0]}-{name[1]}")

    def trim(self) -> list[float]:
        """Ages of what is kept."""
        oldest = parse(self.ages.oldest_kept(KEEP, self.redis_seconds))
        self.made = {name: at for name, at in self.made.items() if name >= oldest}
        return [self.now - at for at in self.made.values()]


# case: DST-06, RED-12
@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_an_hour_more_or_less_on_redis_clock_changes_nothing(jump: float) -> None:
    stream = Stream()
    stream.run(900)
    stream.redis_ahead = jump
    for seconds in (1, 60, 700):
        stream.run(seconds)
        ages = stream.trim()
        assert KEEP - 1 <= max(ages) <= KEEP + EVERY_SECONDS + 1


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_young_agent_takes_out_nothing_that_it_sent(jump: float) -> None:
    stream = Stream()
    stream.run(100)
    stream.redis_ahead = jump
    stream.run(10)
    assert len(stream.trim()) == 110
    assert parse(Ages(lambda: 0.0).oldest_kept(KEEP, START)) == (int((START - KEEP) * 1000), 0), "or by Redis' clock"


def test_a_stream_that_begins_anew_is_not_trimmed_by_the_names_of_the_last() -> None:
    stream = Stream()
    stream.run(900)
    stream.made.clear()
    stream.redis_ahead = -7200.0  # another server, whose clock is behind
    stream.run(700)
    assert KEEP - 1 <= max(stream.trim()) <= KEEP + EVERY_SECONDS + 1


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(-5000, 5000)), max_size=30))
def test_what_is_younger_is_always_kept(jumps: list[tuple[int, float]]) -> None:
    stream = Stream()
    for seconds, ahead in jumps:
        stream.redis_ahead = ahead
        stream.run(seconds)
        before = sum(stream.now - at < KEEP for at in stream.made.values())
        assert len([age for age in stream.trim() if age < KEEP]) == before
