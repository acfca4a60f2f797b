"""What the measurements share: the device, time and peak memory in a process of its own, lines on requirements."""

import ctypes
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from specdist.stages.process import keep_freed_memory, use_all_cores

# A process is forked from one that holds these, so that each does not spend seconds on them
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["specdist.training.draft", "specdist.training.heads", "specdist.dataset.features"])
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
    """What `function` returns in a process that has done nothing but imports; it lies at the top of a module."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(function, *arguments).result()


class OwnProcess:
    """An object in a process of its own, in which nothing else is done: `make(*arguments)`, until the block ends."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=PROCESSES)
        self._pool.submit(_make, make, *arguments).result()

    def __enter__(self) -> "OwnProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def call(self, method: str, *arguments: Any) -> Any:
        """What the object's method of that name returns."""
        return self._pool.submit(_call, method, *arguments).result()


_held: list[Any] = []  # in such a process: the object


def _make(make: Callable[..., Any], *arguments: Any) -> None:
    _held.append(make(*arguments))


def _call(method: str, *arguments: Any) -> Any:
    return getattr(_held[0], method)(*arguments)


def peak_megabytes(call: Callable[[], Any]) -> tuple[float, float]:
    """Memory of this process before a call, and its peak during it: on CUDA of tensors, else resident (on Linux)."""
    before = start_peak()
    call()
    return before, peak_since_start()


def start_peak() -> float:
    """MB that this process takes now, from where on its peak counts."""
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6
    REFERENCED.write_text("5")  # the peak is now the present size
    return _kilobytes("VmRSS") * 1.024e-3


def peak_since_start() -> float:
    """MB at the peak since `start_peak`."""
    return torch.cuda.max_memory_allocated() / 1e6 if device() == "cuda" else _kilobytes("VmHWM") * 1.024e-3


def give_back_freed_memory() -> None:
    """Hand what glibc keeps of freed memory to the system, so that it does not hide what comes next."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


class Clock(TrainerCallback):
    """Seconds from the end of the first step, which warms up, to that of the last: with loading of batches."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        """See TrainerCallback."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.ends[0]


class StepMemory(TrainerCallback):
    """Peaks of the steps after the first, which makes the optimizer's state, beyond what exists before each: in MB."""

    def __init__(self) -> None:
        self.before, self.extra = 0.0, list[float]()

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        """See TrainerCallback."""
        give_back_freed_memory()
        self.before = start_peak()

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        """See TrainerCallback."""
        self.extra.append(peak_since_start() - self.before)

    @property
    def peak(self) -> float:
        return max(self.extra[1:])


def _kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


def print_requirement(text: str, value: float, limit: float) -> bool:
    """A line that says whether `value` is at most `limit`."""
    print(f"{'held' if value <= limit else 'NOT HELD'}: {text}: {value:.3g}, at most {limit:g}")
    return value <= limit
