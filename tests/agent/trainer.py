"""A training process for tests: a rendezvous port, a forked worker, frames of one rank until SIGTERM.

`python trainer.py RUN`: prints one JSON line, then sends a frame every 10 ms; SIGTERM: goodbye and a clean end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

import hand_made as make

from fp8watch.settings import Settings
from fp8watch.transport import Channel


def main() -> None:
    run = sys.argv[1]
    rendezvous = socket.create_server(("127.0.0.1", 0))
    channel = Channel(run=run, settings=Settings())
    channel.set_preamble([make.hello(run), make.layout(run)])
    while not channel.is_connected:
        time.sleep(0.02)
    worker = os.fork()
    if worker == 0:  # like a data loading worker: lives on for a while when the trainer is killed
        rendezvous.close()
        time.sleep(60)
        os._exit(0)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    print(json.dumps({"port": rendezvous.getsockname()[1], "worker": worker}), flush=True)
    step = 0
    while not told.is_set():
        step += 1
        channel.send(make.frame(run, step, 6, amax=1.0, scale=448.0))
        time.sleep(0.01)
    channel.send(make.goodbye(run, step))
    channel.close()
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


main()
