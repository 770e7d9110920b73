"""Reads the node's GPUs through NVML every few seconds: power, clocks, memory, energy, uncorrected errors, XID events.

Needs the package `nvidia-ml-py` (module `pynvml`) and a driver. Without them `fp8watch_gpu_observable` is 0 and no
other GPU series is exported, because a zero could be taken for a measurement. The label `UUID` is spelled as in
dcgm-exporter, so that series can be joined. All NVML calls run on one thread. Unsupported readings are left out.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8watch.metrics import BY_NAME
from fp8watch_agent.families import Family

logger = logging.getLogger(__name__)
READ_SECONDS = 5.0
ENERGY_WINDOW_SECONDS = 60.0
_WATTS, _HERTZ, _JOULES = 1e-3, 1e6, 1e-3
"""NVML reports milliwatts, megahertz and millijoules (nvml.h)."""


@dataclass(slots=True)
class _Gpu:
    index: str
    uuid: str
    handle: Any
    values: dict[str, float] = field(default_factory=dict)
    xids: Counter[int] = field(default_factory=Counter)


class GpuWatch:
    """Reads the GPUs on a thread between `start` and `stop`. `why` is the reason when there are none to read."""

    def __init__(self, node: str, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._node = node
        self._load = load
        self._nvml: Any = None
        self._gpus: list[_Gpu] = []
        self._events: Any = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._history: dict[str, deque[tuple[float, float, float]]] = {}
        self.why = "not started"

    def start(self) -> None:
        """Start the thread, which looks for GPUs."""
        self._thread = threading.Thread(target=self._run, name="fp8watch-gpu", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; wait at most 2 s."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def families(self, tokens: Mapping[str, float]) -> list[Family]:
        """The latest readings. `tokens`: run -> tokens trained on this node, for the energy per token."""
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for gpu in self._gpus:
            labels = (self._node, gpu.index, gpu.uuid)
            for name, value in dict(gpu.values).items():
                found.setdefault(name, []).append((labels, value))
            for xid, count in dict(gpu.xids).items():
                found.setdefault("gpu_xid_errors_total", []).append(((*labels, str(xid)), float(count)))
        found["gpu_observable"] = [((self._node,), float(bool(self._gpus)))]
        for run, joules in self._energy_per_token(tokens).items():
            found.setdefault("energy_per_token_joules", []).append(((run, self._node), joules))
        return [Family(metric=BY_NAME[f"fp8watch_{name}"], samples=samples) for name, samples in found.items()]

    def _run(self) -> None:
        if not self._find():
            return
        while not self._stopping.is_set():
            for gpu in self._gpus:
                self._read(gpu)
            self._listen()

    def _find(self) -> bool:
        try:
            self._nvml = self._load()
            self._nvml.nvmlInit()
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus.append(_Gpu(str(index), _text(self._nvml.nvmlDeviceGetUUID(handle)), handle))
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
            logger.info("GPUs are not observable: %s", self.why)
            self._gpus = []
            return False
        self.why = ""
        try:
            self._events = self._nvml.nvmlEventSetCreate()
            for gpu in self._gpus:
                self._nvml.nvmlDeviceRegisterEvents(gpu.handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        except Exception as error:
            self._events = None
            logger.info("XID events are not observable: %s", error)
        return True

    def _read(self, gpu: _Gpu) -> None:
        nvml, handle = self._nvml, gpu.handle
        readings: dict[str, Callable[[], float]] = {
            "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _WATTS,
            "gpu_sm_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * _HERTZ,
            "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_energy_joules_total": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * _JOULES,
            "gpu_ecc_uncorrected_total": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        for name, read in readings.items():
            try:
                gpu.values[name] = float(read())
            except Exception as error:
                gpu.values.pop(name, None)  # not supported, or the GPU is lost
                logger.debug("%s of GPU %s: %s", name, gpu.index, error)

    def _listen(self) -> None:
        """Wait for XID events until the next reading is due."""
        until = time.monotonic() + READ_SECONDS
        while not self._stopping.is_set() and (left := until - time.monotonic()) > 0:
            if self._events is None:
                self._stopping.wait(left)
                return
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, int(min(left, 0.5) * 1000))
            except Exception:  # NVML reports a timeout as an error
                self._stopping.wait(0.05)
                continue
            uuid = _text(self._nvml.nvmlDeviceGetUUID(event.device))
            for gpu in self._gpus:
                if gpu.uuid == uuid:
                    gpu.xids[int(event.eventData)] += 1
                    logger.warning("GPU %s (%s): XID %d", gpu.index, uuid, event.eventData)

    def _energy_per_token(self, tokens: Mapping[str, float]) -> dict[str, float]:
        """Only when a single run trains on this node: energy cannot be split between runs."""
        joules = [gpu.values.get("gpu_energy_joules_total") for gpu in self._gpus]
        if len(tokens) != 1 or not joules or any(value is None for value in joules):
            return {}
        (run, count), now = next(iter(tokens.items())), time.monotonic()
        history = self._history.setdefault(run, deque())
        history.append((now, sum(value for value in joules if value is not None), count))
        while len(history) > 1 and now - history[0][0] > ENERGY_WINDOW_SECONDS:
            history.popleft()
        _, first_joules, first_count = history[0]
        trained = count - first_count
        return {run: (history[-1][1] - first_joules) / trained} if trained > 0 else {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
