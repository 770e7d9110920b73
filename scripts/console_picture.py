"""Runs the demo and photographs the console as docs/images/console.png, the picture in the README.

python scripts/console_picture.py [SCENARIO]

Needs Chromium (`scripts/system-packages.sh`). 256 colours, which the page does not exceed by much, take a third of the
bytes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "console.png"
STEPS, FAULT_STEP = 160, 110
SIZE = {"width": 1440, "height": 2090}
MOST_SECONDS = 60.0


def main() -> None:
    """Run, serve, photograph."""
    scenario = sys.argv[1] if len(sys.argv) > 1 else "lr-too-high"
    folder = tempfile.mkdtemp()
    environment = {**os.environ, "FP8WATCH_DIR": folder}
    steps = ["--steps", str(STEPS), "--fault-step", str(FAULT_STEP)]
    subprocess.run(
        ["fp8watch", "demo", "--scenario", scenario, *steps, "--json"], env=environment, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    run = next(path.name for path in sorted(Path(folder, "runs").iterdir()) if path.name.startswith(f"demo-{scenario}"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    console = subprocess.Popen(["fp8watch", "console", "--dir", folder, "--port", str(port)], start_new_session=True)
    try:
        _await(f"http://127.0.0.1:{port}/_stcore/health")
        picture = Image.open(BytesIO(_photograph(f"http://127.0.0.1:{port}/?run={run}")))
    finally:
        console.terminate()
        console.wait(timeout=20)
    picture.convert("RGB").quantize(256).save(OUT, optimize=True)


def _await(address: str) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            urllib.request.urlopen(address, timeout=2).close()
            return
        time.sleep(0.2)
    raise TimeoutError(f"the console does not answer at {address}")


def _photograph(address: str) -> bytes:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )  # fmt: skip
        page = browser.new_page(viewport=SIZE)
        page.goto(address)
        page.wait_for_selector(".js-plotly-plot .heatmaplayer image", timeout=1000 * MOST_SECONDS)
        page.wait_for_timeout(3000)  # until tables are laid out
        taken: bytes = page.screenshot()
        browser.close()
    return taken


if __name__ == "__main__":
    main()
