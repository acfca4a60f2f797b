"""Measures what W&B costs a training: without it, offline, and with servers that refuse, hang, or hang later.

    python scripts/benchmark.py tracking [--steps 150] [--rounds 2] [--limit 0.02]

Steps are matrix products of the same size in every variant, each logged as the trainer's callback logs it; the variants
take turns. Exit status 1 where a training waits for W&B for more than `--limit` of its steps' time. How its median step
compares with one without W&B is printed beside, which says something on an idle machine alone; and what a server costs
at the start and at the end of a run, whatever its length.
"""

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from specdist import tracking

VARIANTS = ("without W&B", "offline", "refuses", "hangs", "hangs later")
_VALUES = ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "entropy")
_SIZE = 1000  # of a square matrix: four products are a step of some 80 ms, a tenth of the demo's on two cores


def refusing_url() -> str:
    """Of a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def hanging_server(*, alive: bool) -> Iterator[str]:
    """A server that takes every request and never answers; `alive`: but for the question whether it lives."""
    end = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not alive:
                end.wait()
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            end.wait()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        end.set()
        server.shutdown()
        server.server_close()


def _steps(count: int, *, log: bool) -> tuple[list[float], float]:
    """Seconds of each step, what it logs included, and those of logging alone, of all steps together."""
    import wandb

    matrix, seconds, waited = torch.eye(_SIZE), [], 0.0
    for step in range(count):
        began = time.perf_counter()
        for _ in range(4):
            matrix = matrix @ matrix
        worked = time.perf_counter()
        if log:
            wandb.log({f"train/{name}": float(step) for name in _VALUES} | {"train/global_step": step})
        seconds.append(time.perf_counter() - began)
        waited += time.perf_counter() - worked
    return seconds, waited


def _run(variant: str, count: int) -> tuple[list[float], float, float]:
    """Seconds of each step of one run, of logging in all of them, and before and after them together."""
    import wandb

    server = hanging_server(alive=variant == "hangs later") if "hangs" in variant else nullcontext(refusing_url())
    log = variant != VARIANTS[0]
    with tempfile.TemporaryDirectory() as directory, server as url:
        for name in ("MODE", "RUN_ID", "DIR"):
            os.environ.pop(f"WANDB_{name}", None)
        os.environ |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40}
        if variant == "offline":
            os.environ["WANDB_MODE"] = "offline"
        report_to = ["wandb"] if log else []
        began = time.perf_counter()
        tracking.prepare_wandb(report_to, Path(directory), "benchmark")
        tracking.start_wandb(report_to, None)
        around = time.perf_counter() - began
        seconds, waited = _steps(count, log=log)
        began = time.perf_counter()
        if log:
            wandb.finish()
        return seconds, waited, around + time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the variants in turn and print what they cost."""
    parser = argparse.ArgumentParser(prog="scripts/benchmark.py tracking", description="What W&B costs a training.")
    add = parser.add_argument
    add("--steps", type=int, default=150, metavar="N", help="of each run (default: %(default)s)")
    add("--rounds", type=int, default=2, metavar="N", help="runs of each variant (default: %(default)s)")
    add("--limit", type=float, default=0.02, help="of the steps' time (default: %(default)s)")
    args = parser.parse_args(arguments)
    _steps(20, log=False)
    steps: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    waited, around = dict.fromkeys(VARIANTS, 0.0), dict.fromkeys(VARIANTS, 0.0)
    for variant in VARIANTS * args.rounds:
        seconds, logging_seconds, rest = _run(variant, args.steps)
        steps[variant] += seconds
        waited[variant] += logging_seconds
        around[variant] = max(around[variant], rest)
    plain = statistics.median(steps[VARIANTS[0]])
    shares = {variant: waited[variant] / sum(steps[variant]) for variant in VARIANTS}
    for variant, share in shares.items():
        median = statistics.median(steps[variant])
        print(
            f"{variant:12} waits for {share:.2%} of its steps' time; median step {1000 * median:6.2f} ms "
            f"({median / plain - 1:+.1%}); start and end {around[variant]:5.1f} s"
        )
    late = max(shares.values()) > args.limit
    print(f"{'failed' if late else 'passed'}: at most {args.limit:.0%} of the steps' time")
    return int(late)
