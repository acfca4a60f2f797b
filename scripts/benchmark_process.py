"""What the measurements share: the device, peak memory of a call in a process of its own, lines on requirements."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from specdist.stages.process import keep_freed_memory, use_all_cores

STATUS, REFERENCED = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def device() -> str:
    """Where to measure: CUDA where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare_process(threads: int | None) -> None:
    """Cores and memory as in training; `threads` instead of all cores."""
    use_all_cores()
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a process that has done nothing else; it lies at the top of a module."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def peak_megabytes(call: Callable[[], Any]) -> tuple[float, float]:
    """Memory of this process before a call, and its peak during it: on CUDA of tensors, else resident (on Linux)."""
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return before / 1e6, torch.cuda.max_memory_allocated() / 1e6
    REFERENCED.write_text("5")  # the peak is now the present size
    before = _kilobytes("VmRSS")
    call()
    return before * 1.024e-3, _kilobytes("VmHWM") * 1.024e-3


def _kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


def print_requirement(text: str, value: float, limit: float) -> bool:
    """A line that says whether `value` is at most `limit`."""
    print(f"{'held' if value <= limit else 'NOT HELD'}: {text}: {value:.3f}, at most {limit:g}")
    return value <= limit
