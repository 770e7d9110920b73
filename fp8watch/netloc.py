"""Host and port as they stand in a URL and in Prometheus' lists of targets."""

from __future__ import annotations


def netloc(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Where this machine reaches what listens on `host`: every address of a family stands for its loopback."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
