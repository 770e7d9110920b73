"""Looking at objects of others, which answer as they like: a proxy may raise KeyError for what it does not have."""

from __future__ import annotations

from typing import Any


def attribute(value: Any, name: str) -> Any:
    """The attribute; None where there is none, whatever is raised over it."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None
