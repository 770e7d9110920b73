"""A person's verdict, signed by the command line and verified by the controller.

An approval names one action of one run and counts only while that action waits, so that it cannot be used twice. One
that was given before the action was decided is not about it.
"""

from __future__ import annotations

import msgspec

from fp8watch.controller.stores.base import Approval
from fp8watch.security.canonical import is_signed, signed
from fp8watch.security.keyring import KeyRing


def sign(approval: Approval, ring: KeyRing | None) -> Approval:
    """The command line's side. No ring: unsigned."""
    return approval if ring is None else signed(approval, ring)


def verify(approval: Approval, ring: KeyRing | None) -> bool:
    """The controller's side. No ring: whoever can write the store is believed, as with a file of one user."""
    return ring is None or is_signed(approval, ring)


def sort(approvals: list[Approval], ring: KeyRing | None, refused: set[bytes]) -> tuple[list[Approval], int]:
    """The genuine ones, and how many of the others are new.

    A verdict stays in the store while its action waits, and is looked at twice a second: `refused` (changed here) holds
    what was refused at the last look, so that each is counted once.
    """
    genuine, forged = [], set()
    for item in approvals:
        if verify(item, ring):
            genuine.append(item)
        else:
            forged.add(msgspec.msgpack.encode(item))
    new = len(forged - refused)
    refused.clear()
    refused |= forged
    return genuine, new
