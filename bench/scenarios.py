"""Acceptance of the demo's scenarios over seeds: what is found, what is done, and how much of the loss is saved.

    python bench/scenarios.py [--scenario NAME ...] [--seed N ...] [--policy auto|observe ...] [--vary] [--jobs 2]
                              [--device cpu|cuda] [--merge] [--missing] [--twins FOLDER] [--out FILE]

Writes bench/results/scenarios.json and exits with 1 when a row misses its bar. With `--device cuda` the runs are those
of Transformer Engine on a GPU, and the file is bench/results/scenarios_h200.json. Twins are trained once per seed and
config; with `--twins` they are kept in a folder for later invocations of the same code. `--vary` uses other fault steps
and layers than the defaults. `--merge` keeps rows of the file that this invocation does not run, so that a long sweep
can be made in parts (rows are written as soon as they are ready); the gap that auto closes is then computed from the
file's row of observe. `--missing` runs only what the file does not contain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from result_head import as_text, head

from fp8watch.demo import result
from fp8watch.demo.engines.choice import choose
from fp8watch.demo.model import Shape, layer_names
from fp8watch.demo.plan import Plan, make_plan
from fp8watch.demo.processes import Losses, TrainingProcess
from fp8watch.demo.runner import run_plan
from fp8watch.demo.scenarios.catalogue import SCENARIOS

RESULTS = Path(__file__).parent / "results"
OUT = {"cpu": RESULTS / "scenarios.json", "cuda": RESULTS / "scenarios_h200.json"}
PRECISION_ACTIONS = {"repair_scale", "raise_margin", "bf16_layers", "bf16_all", "adjust_loss_scale"}
WITHIN_TWIN = 0.03
"""Bar of auto in the scenarios that it must save."""
SAVED = {"frozen-scale", "gradient-underflow", "nan-loss", "lr-too-high"}
WORSE_IN_OBSERVE = {"frozen-scale": 0.10, "gradient-underflow": 0.05, "short-warmup": 0.03, "grad-bursts": 0.05}
"""Smallest damage of the fault where nobody acts, relative to the twin: with less there is nothing to save."""
GAP_CLOSED = {"frozen-scale": 0.95, "gradient-underflow": 0.95, "short-warmup": 0.5, "grad-bursts": 0.5}
"""Smallest share of the damage that acting saves, where the damage is known."""
GAP = "enough of the gap closed"
ONLY_ACTIONS = {"short-warmup": {"lengthen_warmup", "rewarm"}, "grad-bursts": {"tighten_clip"}}
CAUSES = {
    "frozen-scale": {"bookkeeping"},
    "gradient-underflow": {"bookkeeping"},
    "lr-too-high": {"optimisation"},
    "short-warmup": {"optimisation"},
    "grad-bursts": {"optimisation", "unknown"},
    "bit-flip": {"hardware", "unknown"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--policy", action="append", choices=["auto", "observe"])
    parser.add_argument("--vary", action="store_true", help="other fault steps and layers than the defaults")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=list(OUT), default="cpu")
    parser.add_argument("--out", type=Path, help="default: depends on the device")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of the file")
    parser.add_argument("--missing", action="store_true", help="run what the file does not hold; implies --merge")
    parser.add_argument("--twins", type=Path, help="folder in which losses of healthy twins are kept")
    chosen = parser.parse_args()
    engine = choose(chosen.device)
    if chosen.device == "cuda" and engine.engine != "transformer_engine":
        parser.error(engine.told)
    chosen.out = chosen.out or OUT[chosen.device]
    on = {"device": chosen.device, "engine": engine.engine}
    known = _known(chosen.out) if chosen.merge or chosen.missing else []
    held = {(*_place(row), row["policy"]) for row in known} if chosen.missing else set()
    plans = [
        plan
        for seed in chosen.seed or range(5)
        for name in chosen.scenario or SCENARIOS
        for policy in chosen.policy or _policies(name)
        if _place_of(
            plan := make_plan(
                scenario=name, policy=policy, seed=seed, **on, **(_varied(name, seed) if chosen.vary else {})
            )
        )
        not in held
    ]
    rows = known
    with tempfile.TemporaryDirectory(prefix="fp8watch-bench-") as folder:
        os.environ["FP8WATCH_DIR"] = folder
        os.environ["FP8WATCH_METRICS_PORT"] = "0"
        with ThreadPoolExecutor(chosen.jobs) as pool:
            twins = _twins(plans, pool, Path(folder), chosen.twins)
            results: list[dict[str, Any]] = []
            for done in as_completed([pool.submit(_run, plan, twins[_key(plan)]) for plan in plans]):
                results.append(done.result())
                rows = _rows(results, known)
                _write(chosen.out, rows)
    for row in rows:
        print(_line(row))
    return 0 if all(row["pass"] for row in rows) else 1


def _rows(results: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """This invocation's results, and the rows that the file keeps, with gaps computed again where observe is new."""
    observed = {_place(row): row["final_loss"] for row in [*known, *results] if row["policy"] == "observe"}
    rows = [_row(each, observed) for each in results]
    new = {(*_place(row), row["policy"]) for row in rows}
    kept = [row for row in known if (*_place(row), row["policy"]) not in new]
    return sorted([*(_with_gap(row, observed) for row in kept), *rows], key=_order)


def _with_gap(row: dict[str, Any], observed: dict[tuple[Any, ...], float | None]) -> dict[str, Any]:
    gap_closed = _gap_closed(row, observed)
    if gap_closed is None:
        return row
    checks = dict(row["checks"])
    if GAP in checks:
        checks[GAP] = gap_closed >= GAP_CLOSED[row["scenario"]]
    return row | {"gap_closed": gap_closed, "checks": checks, "pass": all(checks.values())}


def _gap_closed(row: dict[str, Any], observed: dict[tuple[Any, ...], float | None]) -> float | None:
    """Share of the loss between observe and the twin that acting saved; None where that is not known."""
    loss, final, twin = observed.get(_place(row)), row["final_loss"], row["twin_final_loss"]
    if row["policy"] != "auto" or loss is None or final is None:
        return None
    return float((loss - final) / (loss - twin))


def _place_of(plan: Plan) -> tuple[Any, ...]:
    return (plan.scenario.name, plan.watched.config.seed, plan.fault_step, plan.layer, plan.policy)


def _policies(scenario: str) -> list[str]:
    return ["auto", "observe"] if scenario in WORSE_IN_OBSERVE else ["auto"]


def _varied(scenario: str, seed: int) -> dict[str, Any]:
    """Another fault step and layer for each seed, the same in every run of this script."""
    chosen = SCENARIOS[scenario]
    options: dict[str, Any] = {}
    if chosen.takes_fault_step:
        options["fault_step"] = 160 + 37 * seed % 80
    if chosen.layer is not None:
        names = layer_names(Shape())
        kind = chosen.layer.rsplit(".", 1)[1]
        fitting = [name for name in names if name.endswith(kind)] if scenario == "outlier-channel" else names
        options["layer"] = fitting[(3 + 5 * seed) % len(fitting)]
    return options


def _key(plan: Plan) -> str:
    return msgspec.json.encode(plan.twin).decode()


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies a row, apart from the policy."""
    return tuple(row[name] for name in ("scenario", "seed", "fault_step", "layer"))


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["seed"], list(SCENARIOS).index(row["scenario"]), row["policy"], str(row["fault_step"]))


def _known(out: Path) -> list[dict[str, Any]]:
    return list(json.loads(out.read_text())["rows"]) if out.exists() else []


def _twins(plans: Iterable[Plan], pool: ThreadPoolExecutor, folder: Path, kept: Path | None) -> dict[str, Losses]:
    wanted = {_key(plan): plan for plan in plans}
    names = {key: folder / f"twin{index}.log" for index, key in enumerate(wanted)}
    return dict(zip(wanted, pool.map(lambda key: _twin(wanted[key], names[key], kept), wanted), strict=True))


def _twin(plan: Plan, log: Path, kept: Path | None) -> Losses:
    """Train the twin, or use what an earlier invocation of the same code has kept."""
    if kept is None:
        return _train(plan, log)
    path = kept / f"{hashlib.sha256((_key(plan) + _code()).encode()).hexdigest()[:24]}.json"
    losses = Losses()
    if not path.exists():
        losses = _train(plan, log)
        kept.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(losses.series()))
        return losses
    for step, loss in json.loads(path.read_text()):
        losses.add(step, loss)
    return losses


def _code() -> str:
    """Digest of the code that a twin's losses depend on, besides its spec."""
    import torch

    import fp8watch.demo
    import fp8watch.emulation

    digest = hashlib.sha256(torch.__version__.encode())
    for package in (fp8watch.demo, fp8watch.emulation):
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _train(plan: Plan, log: Path) -> Losses:
    process = TrainingProcess(plan.twin, log)
    try:
        if process.wait() != 0:
            raise RuntimeError(f"the twin failed:\n{process.error_text()}")
    finally:
        process.stop()
    return process.losses


def _run(plan: Plan, twin: Losses) -> dict[str, Any]:
    progress = run_plan(plan, with_unwatched=False, twin=twin)
    found = result.as_json(
        plan, progress.story, watched=progress.watched, twin=twin, unwatched=None, ended=progress.ended
    )
    found["identical_to_twin"] = progress.watched.series() == twin.series()
    print(_summary(found), file=sys.stderr, flush=True)
    return found


def _summary(found: dict[str, Any]) -> str:
    acts = [f"{f['step']}:{f['detector']}/{f['cause']}" for f in found["findings"] if f["severity"] == "act"]
    actions = [f"{a['applied_step']}:{a['action']}({a['readback']},{a['outcome']})" for a in found["actions"]]
    final = "null" if found["final_loss"] is None else f"{found['final_loss']:.4f}"
    return (
        f"{found['scenario']} seed {found['seed']} {found['policy']}: {final} twin {found['twin_final_loss']:.4f}"
        f" | {' '.join(acts) or 'no act finding'} | {' '.join(actions) or 'no action'}"
    )


def _row(found: dict[str, Any], observed_losses: dict[tuple[Any, ...], float | None]) -> dict[str, Any]:
    name, final, twin = found["scenario"], found["final_loss"], found["twin_final_loss"]
    worse = None if final is None else final / twin - 1
    gap_closed = _gap_closed(found, observed_losses)
    checks = _checks(found, worse, gap_closed)
    act = [finding for finding in found["findings"] if finding["severity"] == "act"]
    return {
        "scenario": name,
        "seed": found["seed"],
        "policy": found["policy"],
        "fault_step": found["fault_step"],
        "layer": found["layer"],
        "final_loss": final,
        "twin_final_loss": twin,
        "worse": worse,
        "gap_closed": gap_closed,
        "found": [
            {key: f[key] for key in ("step", "onset_step", "detector", "cause", "tensor")} | {"severity": "act"}
            for f in act
        ],
        "actions": [
            {key: a[key] for key in ("action", "decided_step", "applied_step", "readback", "outcome")}
            for a in found["actions"]
        ],
        "steps_replayed": found["steps_replayed"],
        "checks": checks,
        "pass": all(checks.values()),
    }


def _checks(found: dict[str, Any], worse: float | None, gap_closed: float | None) -> dict[str, bool]:
    name, is_auto = found["scenario"], found["policy"] == "auto"
    act = [finding for finding in found["findings"] if finding["severity"] == "act"]
    done = {action["action"] for action in found["actions"]}
    checks = {}
    if name == "healthy":
        checks["no act finding"] = not act
        checks["no action"] = not done
        if found["engine"] == "emulation":  # on a GPU two equal runs differ: sums of gradients are in no fixed order
            checks["identical to twin"] = found["identical_to_twin"]
    if is_auto and name in SAVED:
        checks["within 3 % of twin"] = worse is not None and worse <= WITHIN_TWIN
    if not is_auto:
        checks["no action"] = not done
        # A loss that is not finite is as bad as possible.
        checks["worse than twin"] = worse is None or worse >= WORSE_IN_OBSERVE.get(name, -1.0)
    if is_auto and name in GAP_CLOSED:
        checks[GAP] = gap_closed is None or gap_closed >= GAP_CLOSED[name]
    if is_auto and name in ONLY_ACTIONS:
        checks["by the right action alone"] = bool(done) and done <= ONLY_ACTIONS[name]
    if name in {"bad-batch", "outlier-channel"}:
        checks["no rollback, no precision action"] = not done & (PRECISION_ACTIONS | {"rollback"})
    if name == "bit-flip":
        checks["no precision action"] = not done & PRECISION_ACTIONS
    if name in CAUSES:
        checks["cause"] = bool(act) and act[0]["cause"] in CAUSES[name]
    return checks


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    import torch

    report = head(torch=torch.__version__) | {"rows": rows}
    if "transformer_engine" in sys.modules:
        report["versions"]["transformer_engine"] = sys.modules["transformer_engine"].__version__
        report["machine"]["gpu"] = torch.cuda.get_device_name()
    out.write_text(as_text(report))


def _line(row: dict[str, Any]) -> str:
    worse = "null" if row["worse"] is None else f"{row['worse']:+z.1%}"
    closed = "" if row["gap_closed"] is None else f", gap closed {row['gap_closed']:.0%}"
    failed = [name for name, passed in row["checks"].items() if not passed]
    verdict = "ok" if row["pass"] else f"MISSED: {'; '.join(failed)}"
    return f"{row['scenario']:20} seed {row['seed']} {row['policy']:8} {worse} against twin{closed}: {verdict}"


if __name__ == "__main__":
    sys.exit(main())
