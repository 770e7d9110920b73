"""Whether all ranks came out of a sequence of `agreement_stress.py` alike, and in how many steps they decided."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stress_sequences import AGAIN, PROMPT_STEPS, Sequence

MAX_STEPS = 5
"""Steps from a decision to its effect on all ranks."""

Key = tuple[str, str, int, int]
"""Id, verb, attempt and sequence of a command: what two ranks hold under one key is the same command."""
STATUS = 6
"""Index of the status in an answer."""
READBACK = 7


def judge(sequence: Sequence, out: Path, ranks: int) -> dict[str, Any]:
    """A row of the result; `_decisions` and `_parameters` are digests to compare with another run."""
    row: dict[str, Any] = {
        "name": sequence.name, "faults": {str(k): v for k, v in sequence.faults.items()}, "log": [],
        "by_clock": sequence.is_by_clock,
    }  # fmt: skip
    lines: list[list[dict[str, Any]]] = []
    for rank in range(ranks):
        file = out / f"{sequence.name}-{rank}.jsonl"
        lines.append([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [])
    if any(not rank or "ended" not in rank[-1] for rank in lines):
        return {**row, "pass": False, "why": "a rank did not come to the end", "_decisions": "", "_parameters": ""}
    lasts = [rank[-1] for rank in lines]
    actions = {order.command.id: order.command.action for order in sequence.orders}
    row["log"] = [
        {"id": id_, "action": actions[id_], "verb": verb, "step": step} for id_, verb, step in lasts[0]["log"]
    ]
    row |= {
        "ended": lasts[0]["ended"],
        "steps": len(lines[0]) - 1,
        "answers": sum(len(last["answers"]) for last in lasts),
    }
    row |= steps_taken(sequence, lasts, made=len(lines[0]) - 1)
    row |= unknown_somewhere(sequence, lasts, lines[0][-2])
    why = [*_differences(lines), *(last["problem"] for last in lasts if last["problem"])]
    slow = [what for what, barred in (("decided", not sequence.is_by_clock), ("known", True)) if barred
            for steps in row[f"{what}_steps"] if steps > MAX_STEPS]  # fmt: skip
    why += [f"{len(slow)} commands took more than {MAX_STEPS} steps"] if slow else []
    why += [f"{name} was known to all ranks and not ruled on" for name in row.pop("forgotten")]
    why += [f"{name} was never answered by a rank that held it" for name in row.pop("unanswered")]
    parts = ("log", "asked", "held", "ended")
    return {
        **row, "pass": not why, "why": "; ".join(why[:1]),
        "_decisions": _digest([[*(last[part] for part in parts), *_told(last["answers"])] for last in lasts]),
        "_parameters": _digest([rank[:-1] for rank in lines]),
    }  # fmt: skip


def _told(answers: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """What was answered at each boundary, and what the read-backs came to.

    A save is read back by a thread: at which boundary that has ended depends on the disk, what it came to does not.
    """
    at_once = [answer for answer in answers if answer[READBACK] == "pending"]
    return at_once, sorted(answer[1:] for answer in answers if answer[READBACK] != "pending")


def _differences(lines: list[list[dict[str, Any]]]) -> Iterable[str]:
    for made in zip(*(rank[:-1] for rank in lines), strict=False):
        if any(line != made[0] for line in made):
            yield f"ranks differ at step {made[0]['step']}"
    lasts = [rank[-1] for rank in lines]
    if len({(rank[-1]["ended"], len(rank)) for rank in lines}) > 1:
        yield f"they ended differently: {[(rank[-1]['ended'], len(rank)) for rank in lines]}"
    if any(last["log"] != lasts[0]["log"] for last in lasts):
        yield f"they carried out different things: {[last['log'] for last in lasts]}"


def steps_taken(sequence: Sequence, lasts: list[dict[str, Any]], *, made: int) -> dict[str, Any]:
    """Steps counted as optimizer steps made; a rollback does not wind this count back.

    `decided_steps`: from the frame that a command answers until the command was in force on all ranks, for commands
    that reached every rank within `PROMPT_STEPS`. `known_steps`: from the boundary at which the last rank took a
    command until all had begun, refused or dropped it, for every command that reached all of them; `held_up` are those
    among them that a fault kept from a rank for longer.
    """
    asked = _firsts(last["asked"] for last in lasts)
    held = [_firsts([last["held"]]) for last in lasts]
    answered = [_answered(last) for last in lasts]
    applied = [_firsts([[answer for answer in last["answers"] if answer[STATUS] == "applied"]]) for last in lasts]
    keys = dict.fromkeys(key for rank in held for key in rank)
    found: dict[str, Any] = {"decided_steps": [], "known_steps": [], "held_up": 0, "forgotten": []}
    for key in keys:
        if not all(key in rank for rank in held):
            continue
        known = max(rank[key] for rank in held)
        if not all(key in rank for rank in answered):
            found["forgotten"] += [key[0]] if known + MAX_STEPS <= made else []  # else the run was over before
            continue
        found["known_steps"].append(max(0, max(rank[key] for rank in answered) - known))
        is_prompt = not sequence.is_by_clock and known - asked[key] <= PROMPT_STEPS
        is_late = any(order.late for order in sequence.orders if order.command.sequence == key[3])
        if is_late or not (is_prompt or sequence.is_by_clock):
            found["held_up"] += 1
        elif all(key in rank for rank in applied):
            found["decided_steps"].append(max(rank[key] for rank in applied) - asked[key])
    return found


def unknown_somewhere(sequence: Sequence, lasts: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
    """Commands that reached only some ranks, so that no rank can carry them out: how many there are (`never_known`),
    and those that a rank that held them has not answered (`unanswered`) although they have expired by step or attempt.
    `end`: the last step made."""
    held = [_firsts([last["held"]]) for last in lasts]
    answered = [_answered(last) for last in lasts]
    last_steps = {order.command.sequence: order.command.last_step for order in sequence.orders}
    keys = {key for rank in held for key in rank if not all(key in other for other in held)}
    over = {key for key in keys if key[2] != end["attempt"] or end["step"] >= last_steps[key[3]]}
    silent = {key[0] for key in over for rank in range(len(lasts)) if key in held[rank] and key not in answered[rank]}
    return {"never_known": len(keys), "unanswered": sorted(silent)}


def _answered(last: dict[str, Any]) -> dict[Key, int]:
    """When a rank first answered what it held; a repeated answer is one to each command of its id and verb."""
    found = _firsts([last["answers"]])
    for key, held in _firsts([last["held"]]).items():
        again = [
            at for at, id_, verb, _, sequence, *_ in last["answers"]
            if at >= held and (id_, verb, sequence) == (*key[:2], AGAIN)
        ]  # fmt: skip
        if key not in found and again:
            found[key] = min(again)
    return found


def _firsts(entries: Iterable[list[list[Any]]]) -> dict[Key, int]:
    """Of lists of [boundary, id, verb, attempt, sequence, ...]: the first boundary of each command."""
    found: dict[Key, int] = {}
    for boundary, *rest in (entry for rank in entries for entry in rank):
        key: Key = tuple(rest[:4])  # type: ignore[assignment]
        found[key] = min(boundary, found.get(key, boundary))
    return found


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
