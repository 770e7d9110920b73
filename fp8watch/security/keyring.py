"""The secret keys of one purpose. The first one signs and all verify, so that keys can be rotated during a run.

A key is a line of at least 32 characters (`openssl rand -hex 32` gives 64) in a file or an environment variable. To
rotate: add the new key on every verifier, make it the first on the signer, then remove the old one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fp8watch.errors import BadInput
from fp8watch.security import secret_file
from fp8watch.settings import Settings

Purpose = Literal["command", "frame", "approval"]
PURPOSES: tuple[Purpose, ...] = ("command", "frame", "approval")
MIN_KEY_CHARACTERS = 32
"""Minimum length of a key; 128 bits in hexadecimal."""
MAX_KEYS = 8
"""Every key costs a verifier one HMAC per forged message."""
SIGNATURE_BYTES = hashlib.sha256().digest_size


class KeyRing:
    """HMAC-SHA256 with the keys of one purpose. Its `repr` shows no key."""

    def __init__(self, purpose: Purpose, keys: tuple[bytes, ...]) -> None:
        """`keys`: newest first, at least one."""
        if not keys:
            raise ValueError("a key ring needs a key")
        self.purpose = purpose
        # Keys are derived per purpose: the same secret for two purposes gives different signatures.
        self._keys = tuple(hmac.digest(key, b"fp8watch " + purpose.encode(), hashlib.sha256) for key in keys)

    def sign(self, payload: bytes) -> bytes:
        """Signature of `payload` with the newest key, 32 bytes."""
        return hmac.digest(self._keys[0], payload, hashlib.sha256)

    def verify(self, payload: bytes, signature: bytes) -> bool:
        """Whether the signature is from any of the keys. Runs in constant time."""
        is_ours = False
        for key in self._keys:
            is_ours |= hmac.compare_digest(hmac.digest(key, payload, hashlib.sha256), signature)
        return is_ours

    @property
    def fingerprints(self) -> list[str]:
        """A fingerprint of each key, newest first. Two processes can compare them to see whether they have the same
        key. It reveals no more of the key than a signature does."""
        return [hmac.digest(key, b"fp8watch fingerprint", hashlib.sha256)[:6].hex() for key in self._keys]

    def __repr__(self) -> str:
        return f"KeyRing({self.purpose}, {len(self._keys)} keys)"


def load_ring(settings: Settings, purpose: Purpose) -> KeyRing | None:
    """The keys in `FP8WATCH_<PURPOSE>_KEY` or `FP8WATCH_<PURPOSE>_KEY_FILE`; None when neither is set.

    Raises `BadInput` when both are set, the file cannot be read, or there is no key, a short one or too many.
    """
    text = getattr(settings, f"{purpose}_key")
    path: Path | None = getattr(settings, f"{purpose}_key_file")
    variable = f"FP8WATCH_{purpose.upper()}_KEY"
    if text is not None and path is not None:
        raise BadInput([f"environment:1: {variable}: set, and {variable}_FILE too: give one of them"])
    if text is not None:
        return KeyRing(purpose, _parse(text.get_secret_value(), "environment", variable))
    if path is None:
        return None
    try:
        content = secret_file.content(path).decode()
    except UnicodeDecodeError as error:
        raise BadInput([f"{path}:1: {variable}_FILE: is no UTF-8 text"]) from error
    except (OSError, ValueError) as error:
        raise BadInput([f"{path}:1: {variable}_FILE: {error}"]) from error
    return KeyRing(purpose, _parse(content, str(path), f"{variable}_FILE"))


def shown(rings: Mapping[Purpose, KeyRing | None], *, is_unsigned_taken: bool) -> dict[str, object]:
    """The fingerprints that a process publishes, so that mismatched keys can be found."""
    prints = {purpose: [] if ring is None else ring.fingerprints for purpose, ring in rings.items()}
    return {"keys": prints, "is_unsigned_taken": is_unsigned_taken}


def _parse(text: str, where: str, variable: str) -> tuple[bytes, ...]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    problems = [
        f"{where}:{number}: {variable}: a key has at least {MIN_KEY_CHARACTERS} characters, this one {len(key)}"
        for number, key in keys
        if len(key) < MIN_KEY_CHARACTERS
    ]
    if not keys:
        problems.append(f"{where}:1: {variable}: holds no key")
    if len(keys) > MAX_KEYS:
        problems.append(f"{where}:1: {variable}: {len(keys)} keys, at most {MAX_KEYS}")
    if problems:
        raise BadInput(problems)
    return tuple(key.encode() for _, key in keys)
