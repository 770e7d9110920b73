"""Which node speaks for which rank of a run. Pure: who is there is handed in.

A run belongs to the user who began it and to the nodes that said hello for its ranks, until those ranks have said
goodbye, were reported lost, or their agent has fallen silent. Until then no other node can take a rank over, and nobody
else's process can join: two runs of one name would otherwise be merged into one, and each would obey the other's
commands. A rank that moves after its node has died says hello again until it is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from fp8watch.records import Hello, NodeFrame, RankLost, Uplink

Refusal = Literal["", "other_owner", "other_node"]
"""Why a message is refused; empty: it is not."""


def refusal(message: Uplink, node: str, ranks: Mapping[int, Hello], nodes: Mapping[int, str]) -> Refusal:
    """Whether `node` may say this of a run. `ranks`: the hellos of those that are there; `nodes`: rank -> the node that
    holds it, or held it last."""
    if isinstance(message, Hello):
        return _hello(message, node, ranks, nodes)
    if isinstance(message, NodeFrame | RankLost) and message.node != node:
        return "other_node"
    if not nodes:  # nothing is known of this run, or nothing of its nodes (a memory of an earlier version)
        return ""
    holders = {nodes[rank] for rank in _ranks_of(message) if rank in nodes}
    if not holders:  # of the run, or of a rank that no node has said hello for yet
        return "" if node in nodes.values() else "other_node"
    return "" if holders == {node} else "other_node"


def _hello(hello: Hello, node: str, ranks: Mapping[int, Hello], nodes: Mapping[int, str]) -> Refusal:
    if not ranks:
        return ""
    if any(is_other_owner(known, hello) for known in ranks.values()):
        return "other_owner"
    if hello.rank in ranks and nodes.get(hello.rank, node) != node:
        return "other_node"
    if any(nodes.get(rank, node) == node for rank in ranks):
        return ""  # a node of this run: training was restarted there, or has one more rank
    return "" if any(_may_be_one_job(known, hello) for known in ranks.values()) else "other_node"


def is_other_owner(known: Hello, hello: Hello) -> bool:
    """Whether the agents of both say who their user is, and it is not the same."""
    return known.owner is not None and hello.owner is not None and known.owner != hello.owner


def _may_be_one_job(known: Hello, hello: Hello) -> bool:
    """Whether a rank on a node that holds none yet may belong with one that is there."""
    if known.start and hello.start:
        return known.start == hello.start
    return known.world_size == hello.world_size


def _ranks_of(message: Uplink) -> Iterable[int]:
    if isinstance(message, NodeFrame):
        return message.ranks
    rank: int | None = getattr(message, "rank", None)
    return [] if rank is None else [rank]


def in_the_way(message: Uplink, node: str, ranks: Mapping[int, Hello], nodes: Mapping[int, str]) -> str:
    """The node to name where `node` was refused; empty where none is known."""
    holders = [nodes[rank] for rank in _ranks_of(message) if nodes.get(rank, node) != node]
    return next(iter(holders), next((nodes[rank] for rank in sorted(ranks) if nodes.get(rank, node) != node), ""))
