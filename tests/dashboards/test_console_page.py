"""The page as Streamlit draws it: its numbers are the store's, for two runs that differ in all of them."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import dashboard_runs as runs
import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import fp8watch_dashboards
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import ActionRecord, Finding, StepFrame
from fp8watch.transport import endpoint
from fp8watch_dashboards import places

APP = Path(fp8watch_dashboards.__file__).with_name("app.py")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path))
    st.cache_data.clear()
    st.cache_resource.clear()
    return tmp_path


def open_page(run: str | None = None) -> AppTest:
    page = AppTest.from_file(str(APP), default_timeout=60)
    if run is not None:
        page.query_params["run"] = run
    page.run()
    assert not page.exception
    return page


def metrics(page: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in page.metric}


def figure(page: AppTest, index: int) -> dict:
    return json.loads(page.get("plotly_chart")[index].proto.spec)


def array(value) -> np.ndarray:
    """A trace's array: a list, or Plotly's base64 form."""
    if isinstance(value, list):
        return np.array([np.nan if item is None else item for item in value], dtype=float)
    data = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]))
    return data.reshape([int(n) for n in str(value["shape"]).split(",")]) if "shape" in value else data


@pytest.mark.parametrize("run", ["healthy-run", "rescued-run"])
def test_the_numbers_on_the_page_are_the_stores(root, run):
    paths = {"healthy-run": runs.write_healthy(root), "rescued-run": runs.write_rescued(root)}
    page = open_page(run)
    with places.open_store(paths[run]) as store:
        record = store.runs()[0]
        frames = [f for f in store.read(run, StepFrame) if f.attempt == record.hello.attempt]
        findings, actions = list(store.read(run, Finding)), list(store.read(run, ActionRecord))
    finite = [f.scalars["loss"] for f in frames if np.isfinite(f.scalars["loss"])]
    assert metrics(page) == {
        "Step": str(frames[-1].step),
        "Attempt": str(record.hello.attempt),
        "Last finite loss": f"{finite[-1]:.4f}",
        "Policy mode": "auto" if run == "rescued-run" else "observe",
        "FP8 modules seen": f"{record.hello.observed_modules} of {record.hello.expected_modules}",
        "In BF16 now": str(int(frames[-1].scalars["bf16_modules"])),
    }
    assert any(f"badge[{record.state}]" in item.value for item in page.subheader)
    losses = {trace["name"]: trace for trace in figure(page, 0)["data"]}
    drawn = losses[f"attempt {record.hello.attempt}"]
    assert array(drawn["x"]).tolist() == [f.step for f in frames]
    np.testing.assert_allclose(
        array(drawn["y"]), [f.scalars["loss"] if np.isfinite(f.scalars["loss"]) else np.nan for f in frames]
    )
    assert len(findings) == sum(len(losses[n]["x"]) for n in losses if n.startswith("finding"))
    assert len(actions) == sum(len(losses[n]["x"]) for n in losses if n.startswith("action"))
    assert [len(table.value) for table in page.dataframe] == [n for n in (len(findings), len(actions)) if n]


def test_findings_and_actions_are_listed_with_evidence_and_outcome(root):
    runs.write_rescued(root)
    findings, actions = (table.value for table in open_page().dataframe)
    assert findings.iloc[-1]["evidence"] == "scale 32, expected_scale 0.5, deviation 64"
    assert findings.iloc[-1][["step", "onset", "detector", "cause"]].tolist() == [
        154, 151, "scale_frozen", "bookkeeping",
    ]  # fmt: skip
    assert actions["action"].tolist() == ["tighten_clip", "rollback", "repair_scale"]
    assert actions["what became of it"].tolist() == ["only proposed", "done", "done, but not in force"]
    assert actions["done at"].tolist() == ["-", "170", "156"]
    assert actions["read back"].tolist() == ["-", "ok", "failed"]
    assert actions["effect"].tolist() == ["-", "helped", "no effect"]
    assert actions.iloc[1]["rule"] == "frozen-scale"


def test_the_abandoned_timeline_is_grey_and_marks_sit_at_their_steps(root):
    runs.write_rescued(root)
    traces = {trace["name"]: trace for trace in figure(open_page(), 0)["data"]}
    abandoned, kept = traces["attempt 0, abandoned"], traces["attempt 0"]
    assert array(abandoned["x"]).tolist() == list(range(140, 171))
    assert abandoned["line"]["color"] != kept["line"]["color"]
    assert array(traces["finding (act)"]["x"]).tolist() == [154]
    assert array(traces["action done"]["x"]).tolist() == [156, 170]
    assert array(traces["action not done"]["x"]).tolist() == [200]
    open_star, star = traces["action not done"]["marker"], traces["action done"]["marker"]
    assert open_star["size"] > star["size"], "it is seen around a filled one at the same place"
    assert list(traces).index("action not done") > list(traces).index("action done"), "and lies on top"
    (told,) = traces["action not done"]["customdata"]
    assert "only proposed" in told
    assert "pending" not in told


def test_the_heat_map_shows_clipping_bf16_and_leaves_the_unobserved_empty(root):
    runs.write_rescued(root)
    page = open_page()
    heat = {trace["name"]: trace for trace in figure(page, 1)["data"]}
    z = array(heat["head-room"]["z"])
    names = heat["head-room"]["y"]
    bad = names.index("blocks.2.mlp.down:input")
    centres = array(heat["head-room"]["x"])
    columns = {step: int(np.abs(centres - step).argmin()) for step in (5, 156, 230)}
    assert z[bad, columns[156]] == pytest.approx(-6.0, abs=0.01)
    assert np.isnan(z[0, columns[5]])
    assert np.isnan(z[bad, columns[230]])
    assert array(heat["BF16"]["z"])[bad, columns[230]] == 0.0
    assert (z < 0).sum() == pytest.approx(np.isclose(z, -6.0, atol=0.01).sum())

    page.selectbox(key="steps").select("surviving timeline").run()
    z = array({trace["name"]: trace for trace in figure(page, 1)["data"]}["head-room"]["z"])
    assert not (z < 0).any()

    page.selectbox(key="block").select("3").run()
    names = {trace["name"]: trace for trace in figure(page, 1)["data"]}["head-room"]["y"]
    assert len(names) == 12
    assert all(name.startswith("blocks.3.") for name in names)


def test_a_wide_model_is_drawn_by_block_and_tensor_class(root):
    runs.write_healthy(root, steps=5, num_blocks=40)
    heat = figure(open_page(), 1)["data"][0]
    assert len(heat["y"]) == 40 * 3
    assert heat["y"][0] == "block 0:input"


def test_the_picker_changes_run_and_url_and_a_refresh_keeps_it(root):
    runs.write_healthy(root)
    runs.write_rescued(root)
    page = open_page("healthy-run")
    page.selectbox(key="run").select("rescued-run").run()
    assert metrics(page)["Step"] == "240"
    assert page.query_params["run"] in ("rescued-run", ["rescued-run"])
    page.run()
    assert metrics(page)["Step"] == "240"


def test_a_growing_run_is_followed(root):
    store = runs.write_healthy(root, steps=10)
    page = open_page()
    assert metrics(page)["Step"] == "10"
    with closing(SqliteStore(store)) as db:
        db.append("healthy-run", [runs.frame("healthy-run", 11, num_blocks=2, loss=1.5)])
    st.cache_data.clear()  # what the cache's time to live does within two seconds
    page.run()
    assert metrics(page)["Step"] == "11"
    assert metrics(page)["Last finite loss"] == "1.5000"


def test_an_empty_folder_and_a_lost_store_are_said(root):
    page = open_page()
    assert "No run under" in page.info[0].value
    runs.write_endpoint(root, "gone", root / "nowhere.sqlite")
    page = open_page()
    assert "cannot be read" in page.error[0].value


def test_a_run_that_is_kept_in_memory_is_named_as_such(root):
    folder = root / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "endpoint.json").write_text('{"pid": 1, "socket": "", "metrics_url": "", "store": ""}')
    page = open_page()
    assert "no place to write" in page.warning[0].value


def test_a_clusters_run_is_said_to_be_in_redis(root):
    folder = root / "runs" / "r"
    folder.mkdir(parents=True)
    place = endpoint.Endpoint(
        run="r", pid=1, host="h", socket="", metrics_url="", store="", redis="rediss://redis.example:6379/0"
    )
    endpoint.write(root, place)
    page = open_page()
    assert not page.warning
    for part in ("`rediss://redis.example:6379/0`", "FP8WATCH_REDIS_URL", "fp8watch runs show", "actions list"):
        assert part in page.info[0].value


# case: UI-03
def test_no_page_code_loops_or_sleeps():
    for path in APP.parent.rglob("*.py"):
        text = path.read_text()
        for forbidden in ("time.sleep", "st.rerun", "while True"):
            assert forbidden not in text, f"{path} has {forbidden}"


def test_a_run_whose_process_died_is_not_shown_as_running(root):
    runs.write_rescued(root)
    assert "running" in page_text(open_page("rescued-run"))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store = root / "runs" / "rescued-run" / "store.sqlite"
    place = endpoint.Endpoint(
        run="rescued-run", pid=gone.pid, host=socket.gethostname(), socket="", metrics_url="", store=str(store)
    )
    endpoint.write(root, place)
    st.cache_data.clear()
    assert "lost" in page_text(open_page("rescued-run"))


def page_text(page: AppTest) -> str:
    return " ".join(item.value for item in [*page.markdown, *page.title, *page.caption, *page.subheader, *page.header])
