"""The page of one run: state, loss with findings and actions, head-room by layer and step, and the action log."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from fp8watch import run_words
from fp8watch.transport import endpoint as endpoints
from fp8watch_dashboards import figures, places, queries
from fp8watch_dashboards.timeline import TimelineReader

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 2
PICKER_PIXELS = 480
"""Room for about 55 characters of a run's name."""
ALL_BLOCKS = "all"
EVERY_ATTEMPT = "worst of all attempts"
SURVIVING = "surviving timeline"
STATE_COLOURS = {"running": "green", "ended": "gray", "lost": "red", "halted": "red"}


@st.cache_resource(max_entries=32, show_spinner=False)
def _reader(store: Path, run: str) -> TimelineReader:
    """One reader per run for all viewers, so that ten of them cost about as much as one."""
    return TimelineReader(run=run)


@st.cache_data(ttl=REFRESH_SECONDS * 0.75, max_entries=32, show_spinner=False)
def _view(store: Path, run: str) -> queries.RunView | None:
    """The current view of a run; None until its store has the run."""
    with places.open_store(store) as opened:
        record = next((record for record in opened.runs() if record.run == run), None)
        if record is None:
            return None
        record = endpoints.as_it_is(record, endpoints.read(_root(), run))
        return queries.read_view(opened, record, _reader(store, run))


def _root() -> Path:
    return Path(os.environ.get("FP8WATCH_DIR") or ".fp8watch")


def page() -> None:
    """Draw the page. Only the part below the picker is redrawn every two seconds."""
    root = _root()
    listing = places.find_runs(root)
    for problem in listing.problems:
        st.warning(problem)
    if not listing.places:
        st.title("fp8watch")
        st.info(f"No run under `{root}` yet. A run appears here as soon as a trainer calls `fp8watch.attach`.")
        return
    names = [place.run for place in listing.places]
    wanted = st.query_params.get("run")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        index = names.index(wanted) if wanted in names else 0
        run = st.selectbox("Run", names, index=index, key="run", width=PICKER_PIXELS)
        is_log = st.toggle("Loss on a log axis", key="is_log", width="content")
    st.query_params["run"] = run
    _live(listing.places[names.index(run)], is_log)


@st.fragment(run_every=f"{REFRESH_SECONDS}s")
def _live(place: places.RunPlace, is_log: bool) -> None:
    """The part that is redrawn."""
    if place.store is None and place.endpoint.redis:
        st.info(
            f"The records of this run are in the cluster's Redis, `{place.endpoint.redis}`, which the console does not "
            "read. With `FP8WATCH_REDIS_URL` set, these do: `fp8watch runs show`, `fp8watch incident list` and "
            f"`fp8watch actions list`, each with `{place.run}`. /metrics of agent and controller cover the run too."
        )
        return
    if place.store is None:
        st.warning("The agent of this run found no place to write its store: the run is only in /metrics.")
        return
    started = time.perf_counter()
    try:
        view = _view(place.store, place.run)
    except Exception as error:  # an unreadable store is shown to the user, whatever the engine raised
        logger.warning("cannot read %s: %s", place.store, error)
        st.error(f"The store of this run cannot be read: {error}")
        return
    if view is None:
        st.info(f"`{place.run}` has not written anything yet.")
        return
    _header(view)
    _loss(view, is_log)
    _headroom(view)
    _findings(view)
    _actions(view)
    st.caption(f"Data as of {time.strftime('%H:%M:%S')}, read and drawn in {time.perf_counter() - started:.2f} s.")


def _header(view: queries.RunView) -> None:
    header = view.header
    colour = STATE_COLOURS.get(header.state, "gray")
    st.subheader(f"{view.record.run}  :{colour}-badge[{header.state}]")
    notes = []
    if reason := run_words.reason(view.record):
        notes.append(reason)
    if header.state == "running" and header.last_frame_unix is not None:
        notes.append(f"last step {queries.duration_text(time.time() - header.last_frame_unix)} ago")
    if not header.armed:
        notes.append("disarmed: no action will be taken")
    if header.open_actions:
        notes.append(header.open_actions)
    if notes:
        st.caption("; ".join(notes))
    # Each is as wide as its text, and the row wraps at the window's edge. In columns, metrics would be cut off.
    with st.container(horizontal=True, gap="medium"):
        _metric("Step", f"{header.step:,}")
        _metric("Attempt", str(header.attempt))
        loss = "none yet" if header.loss is None else f"{header.loss:.4f}"
        _metric("Last finite loss", loss, None if header.loss_step is None else f"At step {header.loss_step}.")
        _metric("Policy mode", header.policy_mode, f"Policy: {header.policy_name}")
        seen = f"{header.observed_modules} of {header.expected_modules}"
        _metric("FP8 modules seen", seen, "Modules whose scales are observed, out of all FP8 modules.")
        _metric("In BF16 now", "unknown" if header.bf16_modules is None else str(header.bf16_modules))


def _metric(label: str, value: str, hint: str | None = None) -> None:
    st.metric(label, value, help=hint, width="content")


def _loss(view: queries.RunView, is_log: bool) -> None:
    st.markdown("##### Loss, findings and actions")
    if not view.timeline.points:
        st.info("No step yet.")
        return
    figure = figures.loss_figure(view.timeline, view.findings, view.actions, is_log=is_log)
    st.plotly_chart(figure, key="loss", config={"displaylogo": False})
    if view.timeline.stride > 1:
        st.caption(
            f"One step in {view.timeline.stride} is drawn, and every step around findings and actions and at the end."
        )


def _headroom(view: queries.RunView) -> None:
    st.markdown("##### Head-room by tensor and step")
    if not view.timeline.tensors:
        st.info("No FP8 tensor is observed in this run, only loss and gradients.")
        return
    timeline = view.timeline
    blocks = list(dict.fromkeys(block for block, _ in timeline.tensors))
    attempts = sorted(timeline.first_step_of_attempt)
    left, right, _ = st.columns([3, 3, 2])
    block = left.selectbox("Block", [ALL_BLOCKS, *blocks], key="block")
    choices = {EVERY_ATTEMPT: timeline.points, SURVIVING: timeline.surviving()}
    choices |= {f"attempt {n}": [p for p in timeline.points if p.attempt == n] for n in attempts}
    chosen = EVERY_ATTEMPT
    if len(attempts) > 1:
        chosen = right.selectbox("Steps", list(choices), key="steps")
    figure = figures.headroom_figure(timeline, choices[chosen], None if block == ALL_BLOCKS else block)
    st.plotly_chart(figure, key="headroom", config={"displaylogo": False})
    st.caption(
        "log2(fp8_max / (amax x scale)): below 0 the tensor clips (sand: by a few per cent; red: to half or less); "
        "far above 0 (blue) range is wasted and small values underflow. Empty: not observed. Grey: ran in BF16."
    )


def _findings(view: queries.RunView) -> None:
    st.markdown(f"##### Findings ({len(view.findings)})")
    if view.findings:
        _table(queries.finding_rows(view.findings), key="findings", wide="evidence")
    else:
        st.caption("None.")


def _actions(view: queries.RunView) -> None:
    st.markdown(f"##### Action log ({len(view.actions)})")
    if view.actions:
        now = view.header.step if view.header.state == "running" else None
        _table(queries.action_rows(view.actions, now), key="actions", wide="reason")
    else:
        st.caption("None.")


def _table(rows: list[dict[str, Any]], *, key: str, wide: str) -> None:
    """Draw a table without the columns that have no value at all."""
    columns = {wide: st.column_config.TextColumn(width="large")}
    st.dataframe(pd.DataFrame(rows).dropna(axis=1, how="all"), hide_index=True, key=key, column_config=columns)
