"""Owns running a part of specdist in a process of its own, which may fail or hang and takes nothing with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """How a child ended: what it wrote to standard output, and the last that it said where it failed, else ""."""

    output: str
    fault: str


def run_child(arguments: list[str], text: str, *, seconds: float, without: Collection[str] = ()) -> Ended:
    """Run this interpreter with `arguments` and `text` as standard input for at most `seconds`.

    `without`: environment variables that it does not get. A child that takes longer is killed, with all it started.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={key: value for key, value in os.environ.items() if key not in without},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it starts may outlive a process that is killed alone
    )
    try:
        output, errors = process.communicate(text, timeout=seconds)
    except BaseException as error:  # an interrupt too: in a session of its own the child would not be told
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Ended("", f"not done after {seconds:g} s")
    if process.returncode == 0:
        return Ended(output, "")
    said = [line for line in (output + errors).splitlines() if line.strip()]
    return Ended(output, said[-1] if said else f"failed without a word, exit status {process.returncode}")
