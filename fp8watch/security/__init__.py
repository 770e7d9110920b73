"""Who may make a run do something: keys, and the proof that a command, a frame or an approval comes from their holder.

Three keys, because three parties speak: the controller signs commands (`signatures`), the agent authenticates what it
sends (`envelope`), the command line signs approvals (`approvals`). A holder of one can do nothing in the others' names.
On one machine the unix socket's folder (0700) and the peer's credentials stand in for them.
"""

from fp8watch.security.keyring import PURPOSES, KeyRing, load_ring
from fp8watch.security.signatures import Signer, Verifier

__all__ = ["PURPOSES", "KeyRing", "Signer", "Verifier", "load_ring"]
