"""Keys and signatures: they prove that a command, a frame or an approval comes from a key's holder.

There are three keys for three senders. The controller signs commands (`signatures`), the agent authenticates its
messages (`envelope`), and the command line signs approvals (`approvals`). The holder of one key cannot act for another
sender. On one machine the Unix socket's folder (0700) and the peer credentials take the place of keys.
"""

from fp8watch.security.keyring import PURPOSES, KeyRing, load_ring
from fp8watch.security.signatures import Signer, Verifier

__all__ = ["PURPOSES", "KeyRing", "Signer", "Verifier", "load_ring"]
