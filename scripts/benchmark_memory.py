"""What the measurements share: peak memory of a call in a process of its own, and whether a requirement holds."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

STATUS, REFERENCED = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a process that has done nothing else; it lies at the top of a module."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def extra_peak_megabytes(call: Callable[[], Any], device: str) -> float:
    """How far the memory of this process rises above its present size during a call: on CUDA, of its tensors.

    On a CPU it is resident memory, by Linux' own record of its peak, which is reset first.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    REFERENCED.write_text("5")
    before = _kilobytes("VmRSS")
    call()
    return (_kilobytes("VmHWM") - before) * 1.024e-3


def _kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


def print_requirement(text: str, value: float, limit: float) -> bool:
    """A line that says whether `value` is at most `limit`."""
    print(f"{'held' if value <= limit else 'NOT HELD'}: {text}: {value:.3f}, at most {limit:g}")
    return value <= limit
