"""Random sequences of faults and actions on real ranks: all ranks must come out of each with the same parameters.

    python bench/agreement_stress.py [--sequences 200] [--by-clock 40] [--repeat 2] [--repeat-only N]
                                     [--launches 4] [--ranks 4] [--seed 0] [--out FILE]

Each launch plays its share of the sequences one after the other in the same processes (torch takes seconds to load). A
sequence is a data-parallel training run in emulated FP8 with dropout, a shuffled loader and checkpoints, some twenty
steps long; commands come over a real socket in the real wire format, at random steps, late on some ranks or never.
Faults: a slow rank, a rank that cannot carry out the action, a rank on which it fails after the vote, damaged and
missing shards, a full disk, a connection that is cut, a disarmed rank, a repeated command.

A rank takes each command at the boundary that the sequence says (`stress_arrivals.py`), so a sequence always comes to
the same decisions. All sequences are played `--repeat` times. What every rank held, carried out and answered, with
steps and reasons, is compared with the first time, and so are the parameters of each step. `--by-clock` adds sequences,
played once, in which commands are taken when they arrive: arrivals then fall between any two lines of a rank, and
frames get lost in a connection that is cut. Their decisions depend on the machine; the ranks must be alike in them all
the same.

A sequence passes when, at each step that all ranks made, the parameters are the same on all of them (compared bit by
bit through a checksum), when all ended alike, when the log of what was carried out, with the steps, is the same on all
ranks, and when no command took more than five steps: `decided_steps` and `known_steps` (`stress_judge.py`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from result_head import as_text, head

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "agreement"))

import forked_ranks  # noqa: E402
from fake_controller import FakeController  # noqa: E402
from stress_judge import judge  # noqa: E402
from stress_sequences import draw  # noqa: E402

PROGRAM = Path(__file__).with_name("stress_rank.py")
RARE = 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--by-clock", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--repeat-only", type=int, metavar="N", help="play only the first N again (default: all)")
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agreement_stress.json")
    chosen = parser.parse_args(arguments)
    steady = [f"s{chosen.seed}-{number}" for number in range(chosen.sequences)]
    rows = play_all(steady + [f"c{chosen.seed}-{number}" for number in range(chosen.by_clock)], chosen)
    again = [play_all(steady[: chosen.repeat_only], chosen) for _ in range(chosen.repeat - 1)]
    found = report(rows, again, chosen)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    # What was carried out in a sequence that passed is what its seed says.
    rows = [{name: value for name, value in row.items() if name != "log" or not row["pass"]} for row in found["rows"]]
    chosen.out.write_text(as_text(found | {"rows": rows}))
    tell(found)
    return 0 if found["passed"] == chosen.sequences + chosen.by_clock and not found["hardly_carried_out"] else 1


def play_all(names: list[str], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per sequence, in the order of the names."""
    rows = [row for at in range(chosen.launches) for row in play(names[at :: chosen.launches], chosen.ranks)]
    return sorted(rows, key=lambda row: names.index(row["name"]))


def play(names: list[str], ranks: int) -> list[dict[str, Any]]:
    """Play these sequences in one launch."""
    if not names:
        return []
    sequences = [draw(name, ranks) for name in names]
    out, sockets = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(prefix="fp8w"))
    controller = FakeController(
        sockets / "c.sock", {s.name: s.orders for s in sequences}, {s.name: s.cuts for s in sequences}
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FP8WATCH_AGENT": controller.address,
        "FP8WATCH_DIR": str(out / "fp8watch"), "FP8WATCH_REPORT": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agent")]),
    }  # fmt: skip
    environments = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    logs = [out / f"stderr-{rank}" for rank in range(ranks)]
    processes = forked_ranks.start(PROGRAM, [str(out), *names], environments, logs)
    codes = forked_ranks.codes(processes, 60 + 20 * len(names))
    time.sleep(0.2)
    controller.close()
    rows = [judge(sequence, out, ranks) for sequence in sequences]
    if any(codes) or None in codes:
        said = [log.read_text()[-2000:] for log in logs]
        print(f"ranks ended with {codes}", *said, sep="\n", file=sys.stderr)
    shutil.rmtree(sockets)
    shutil.rmtree(out)
    return rows


def report(rows: list[dict[str, Any]], again: list[list[dict[str, Any]]], chosen: argparse.Namespace) -> dict[str, Any]:
    """The result: the first run of each sequence, with any differences of its repeats."""
    import torch

    for row in rows:
        repeats = [other for run in again for other in run if other["name"] == row["name"]]
        for repeat in repeats:
            if not repeat["pass"] and row["pass"]:
                row |= {"pass": False, "why": f"when played again: {repeat['why']}"}
        if repeats:
            row["same_decisions"] = all(repeat["_decisions"] == row["_decisions"] for repeat in repeats)
            row["same_parameters"] = all(repeat["_parameters"] == row["_parameters"] for repeat in repeats)
            if row["pass"] and not (row["same_decisions"] and row["same_parameters"]):
                what = "decisions" if not row["same_decisions"] else "parameters"
                row |= {"pass": False, "why": f"other {what} when played again"}
    for row in rows:
        del row["_decisions"], row["_parameters"]
    command = (
        f"bench/agreement_stress.py --sequences {chosen.sequences} --by-clock {chosen.by_clock} "
        f"--repeat {chosen.repeat} --launches {chosen.launches} --ranks {chosen.ranks} --seed {chosen.seed}"
    )
    steady = [row for row in rows if not row["by_clock"]]
    return head(command, torch=torch.__version__) | {
        "passed": sum(row["pass"] for row in rows),
        "played_again": sum("same_decisions" in row for row in rows),
        "differing_decisions": sum(not row.get("same_decisions", True) for row in rows),
        "differing_parameters": sum(not row.get("same_parameters", True) for row in rows),
        "decided_steps": _counts(steady, "decided_steps"),
        "known_steps": _counts(rows, "known_steps"),
        "by_clock_decided_steps": _counts([row for row in rows if row["by_clock"]], "decided_steps"),
        "carried_out": dict(sorted(Counter(what["action"] for row in rows for what in row["log"]).items())),
        "hardly_carried_out": hardly_carried_out(rows),
        "held_up": sum(row.get("held_up", 0) for row in rows),
        "never_known": sum(row.get("never_known", 0) for row in rows),
        "rows": rows,
    }  # fmt: skip


def hardly_carried_out(rows: list[dict[str, Any]]) -> list[str]:
    """Actions that were ordered and carried out in fewer than one in `RARE` sequences: these prove nothing of them."""
    ordered = {order.command.action for row in rows for order in draw(row["name"], 4).orders}
    done = Counter(what["action"] for row in rows for what in row["log"])
    return sorted(action for action in ordered if done[action] < len(rows) // RARE)


def _counts(rows: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Number of steps -> how many commands took them."""
    counted = Counter(steps for row in rows for steps in row.get(name, ()))
    return {str(steps): counted[steps] for steps in sorted(counted)}


def tell(found: dict[str, Any]) -> None:
    rows = found["rows"]
    print(f"{found['passed']} of {len(rows)} sequences passed; carried out: {found['carried_out']}")
    print(
        f"of {found['played_again']} played again, {found['differing_decisions']} came to other decisions and "
        f"{found['differing_parameters']} to other parameters"
    )
    print(f"steps (commands) from decision to carried out on all ranks: {found['decided_steps']}")
    print(f"steps (commands) from known to all ranks until ruled on: {found['known_steps']}")
    if found["hardly_carried_out"]:
        print(f"hardly ever carried out: {', '.join(found['hardly_carried_out'])}")
    for row in rows:
        if not row["pass"]:
            print(f"  {row['name']}: {row['why']}")


if __name__ == "__main__":
    sys.exit(main())
