"""Owns what this process takes of its machine: cores and memory."""

import ctypes
import os
import sys

import torch


def use_all_cores() -> None:
    """Share the cores that this process may use among the processes here; accelerate launch would leave one thread.

    SPECDIST_NUM_THREADS says otherwise.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(int(os.environ.get("SPECDIST_NUM_THREADS", share)))


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory; handing large tensors back at once costs a quarter of a step in page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: tensors below 1 GiB come from the heap,
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: which is not returned to the system after each
