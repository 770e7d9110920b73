"""`python -m fp8watch_agent`: how a training process starts an embedded agent."""

from __future__ import annotations

from fp8watch_agent.cli import app

if __name__ == "__main__":
    app(prog_name="fp8watch agent")
