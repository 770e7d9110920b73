"""GPU context through NVML: read where there is a driver, "not observable" where there is none."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import hand_made as make

from fp8watch_agent import gpu as module
from fp8watch_agent.gpu import GpuWatch


class Nvml:
    """As much of pynvml as is called, for two GPUs; the second has no energy counter."""

    NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.joules = 1000.0
        self.events = [SimpleNamespace(device=1, eventData=79)]

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return b"GPU-b" if handle else "GPU-a"

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=7 << 30)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> float:
        if handle:
            raise RuntimeError("not supported")
        return self.joules * 1000

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 3

    def nvmlEventSetCreate(self) -> int:
        return 1

    def nvmlDeviceRegisterEvents(self, handle: int, kind: int, events: int) -> None: ...
    def nvmlEventSetWait_v2(self, events: int, timeout: int) -> Any:
        if self.events:
            return self.events.pop()
        time.sleep(0.01)
        raise RuntimeError("timeout")


def shown(watch: GpuWatch, tokens: dict[str, float] | None = None) -> dict[tuple[str, ...], float]:
    families = watch.families(tokens or {})
    return {(f.metric.name.removeprefix("fp8watch_"), *labels): value for f in families for labels, value in f.samples}


def test_without_a_driver_nothing_is_shown_but_that() -> None:
    def load() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    watch = GpuWatch("n", load)
    watch.start()
    make.wait_for(lambda: "pynvml" in watch.why)
    assert shown(watch) == {("gpu_observable", "n"): 0.0}
    watch.stop()


def test_what_a_gpu_does_not_support_is_left_out_and_units_are_base_units(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.2)
    nvml = Nvml()
    watch = GpuWatch("n", lambda: nvml)
    watch.start()
    found = make.wait_for(
        lambda: shown(watch) if ("gpu_xid_errors_total", "n", "1", "GPU-b", "79") in shown(watch) else None
    )
    assert found["gpu_power_watts", "n", "0", "GPU-a"] == 650.0
    assert found["gpu_sm_clock_hertz", "n", "1", "GPU-b"] == 1.98e9
    assert found["gpu_memory_used_bytes", "n", "0", "GPU-a"] == 7 << 30
    assert found["gpu_ecc_uncorrected_total", "n", "0", "GPU-a"] == 3
    assert found["gpu_energy_joules_total", "n", "0", "GPU-a"] == 1000.0
    assert ("gpu_energy_joules_total", "n", "1", "GPU-b") not in found
    assert found["gpu_xid_errors_total", "n", "1", "GPU-b", "79"] == 1
    assert found["gpu_observable", "n"] == 1.0
    watch.stop()


def test_energy_a_token_needs_all_gpus_and_one_run(monkeypatch: Any) -> None:
    watch = GpuWatch("n")
    watch._gpus = [module._Gpu("0", "a", 0, {"gpu_energy_joules_total": 100.0})]
    assert ("energy_per_token_joules", "r", "n") not in shown(watch, {"r": 50.0})
    watch._gpus[0].values["gpu_energy_joules_total"] = 400.0
    assert shown(watch, {"r": 200.0})["energy_per_token_joules", "r", "n"] == 2.0
    assert not any(key[0] == "energy_per_token_joules" for key in shown(watch, {"r": 300.0, "s": 1.0}))
    watch._gpus.append(module._Gpu("1", "b", 1))
    assert not any(key[0] == "energy_per_token_joules" for key in shown(watch, {"r": 400.0}))
