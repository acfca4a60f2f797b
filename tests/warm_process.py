"""Runs Python scripts in processes of their own that are forked from one with torch, Trainer and specdist in memory.

A script sees what it would in a new interpreter: its command line, environment, folder, streams, and the exit status
is its own. Only the seconds of its imports are not spent again, hundreds of them over all tests.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

TIMEOUT = 170  # seconds, below that of a test
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["specdist.stages.distillation", "specdist.stages.release", "specdist.training.medusa2", "torch.distributed.tensor"]
)


def run_script(arguments: Sequence[str], environment: Mapping[str, str]) -> CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)`."""
    (result,) = run_together(arguments, [environment])
    return result


def run_ranks(arguments: Sequence[str], number: int) -> list[CompletedProcess[str]]:
    """The script in that many processes of one group on the CPU, with the variables that a launcher would set."""
    shared = os.environ | {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    sizes = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return run_together(arguments, [shared | sizes | rank for rank in ranks])


def run_together(arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[CompletedProcess[str]]:
    """The script once in each environment, at the same time; as soon as one fails, the others are killed."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [(Path(folder) / f"{i}.out", Path(folder) / f"{i}.err") for i in range(len(environments))]
        processes = [
            PROCESSES.Process(target=_run, args=(list(arguments), dict(environment), os.getcwd(), *files))
            for environment, files in zip(environments, streams, strict=True)
        ]
        for process in processes:
            process.start()
        running = set(processes)
        while running:
            ended = wait([process.sentinel for process in running], TIMEOUT)
            running -= {process for process in running if process.sentinel in ended}
            if not ended or any(process.exitcode for process in set(processes) - running):
                for process in running:
                    process.kill()
            if not ended:
                raise TimeoutExpired(list(arguments), TIMEOUT)
        return [
            CompletedProcess(arguments, process.exitcode, *(file.read_text(encoding="utf-8") for file in files))
            for process, files in zip(processes, streams, strict=True)
        ]


def _run(arguments: list[str], environment: dict[str, str], folder: str, output: Path, errors: Path) -> None:
    """In the forked process: become the one of this script."""
    for stream, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # as in conftest.py
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
