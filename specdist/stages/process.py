"""Owns what this process takes of its machine, cores and memory, and whether all processes that were asked for run."""

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

from specdist.errors import ConfigError


def use_all_cores() -> None:
    """Share the cores that this process may use among the processes here; accelerate launch would leave one thread.

    SPECDIST_NUM_THREADS says otherwise.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(int(os.environ.get("SPECDIST_NUM_THREADS", share)))


def asked_processes(launcher: int) -> int:
    """How many processes were to run: by what the launcher told this one, else by its own command line.

    `launcher`: its process id. 1 where neither says: accelerate tells only those that it starts as several.
    """
    if told := os.environ.get("WORLD_SIZE"):
        return int(told)
    path = Path(f"/proc/{launcher}/cmdline")
    words = path.read_bytes().decode(errors="replace").replace("=", "\0").split("\0") if path.exists() else []
    options = (words.index(name) for name in ("--num_processes", "--num-processes") if name in words)
    return next((int(words[i + 1]) for i in options if any("launch" in word for word in words[:i])), 1)


def check_num_processes(running: int) -> None:
    """Raise ConfigError unless as many processes run together as were asked of the launcher."""
    if (asked := asked_processes(os.getppid())) != running:
        raise ConfigError(
            f"{asked} processes were asked for (WORLD_SIZE, or --num_processes of accelerate launch), and {running} "
            "run together. Several on a CPU: ACCELERATE_USE_CPU=true accelerate launch --config_file "
            "accelerate_configs/cpu_2proc.yaml …; --cpu --num_processes starts one"
        )


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory; handing large tensors back at once costs a quarter of a step in page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: tensors below 1 GiB come from the heap,
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: which is not returned to the system after each


def free_memory() -> None:
    """Give back what nothing refers to but itself, and what torch keeps of a GPU's memory for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
