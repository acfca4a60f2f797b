"""A small HTTP server that speaks as much of vLLM's API as ServerEngine uses, and fails as it is told to."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 2
MESSAGES = [{"role": "user", "content": "hello"}]
PROBE_IDS = [5, 6, 7]


def expected_ids(prompt_ids: list[int], max_tokens: int) -> list[int]:
    """What the server writes: the prompt's sum and on, ended by EOS where the first id is even and there is room."""
    ids = [100 + sum(prompt_ids) + i for i in range(max_tokens)]
    return [*ids[: max_tokens - 2], EOS] if prompt_ids[0] % 2 == 0 else ids


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go away."""


@dataclass
class FakeServer:
    """`fail` gives the status of a completion by its number from 0, None for an answer; `alter` changes the answer."""

    model: str = "target"
    root: str = "/models/target"
    version: str = "0.32.0"
    context_length: int = 64
    probe_ids: list[int] = field(default_factory=lambda: list(PROBE_IDS))
    fail: Callable[[int], int | None] = lambda number: None
    alter: Callable[[dict[str, Any]], object] = lambda choice: None
    delay: float = 0.0
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.now = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, at the same port as before."""
        self.is_killed = False
        self.server = _Quiet(("127.0.0.1", self.port), _handler(self))
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def kill(self) -> None:
        """Stop listening, and drop what is being answered."""
        self.is_killed = True
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = expected_ids(body["prompt"], body["max_tokens"])
        choice: dict[str, Any] = {
            "finish_reason": "stop" if ids[-1] == EOS else "length",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
        }
        if best := body.get("logprobs"):
            # the token that was drawn comes first, and is not among the best; those are not sorted
            steps = [{f"token_id:{1000 + k}": -1.0 - k for k in reversed(range(best))} for _ in ids]
            choice["logprobs"] = {
                "top_logprobs": [{f"token_id:{i}": -50.0, **step} for i, step in zip(ids, steps, strict=True)]
            }
        self.alter(choice)
        return {"model": self.model, "choices": [choice]}


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def reply(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            fake.keys.add(self.headers["Authorization"])
            cards = [{"id": fake.model, "root": fake.root, "max_model_len": fake.context_length}]
            known = {"/v1/models": {"data": cards}, "/version": {"version": fake.version}}
            self.reply(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            fake.keys.add(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                return self.reply(200, {"tokens": fake.probe_ids, "max_model_len": fake.context_length})
            with fake.lock:
                number = len(fake.bodies)
                fake.bodies.append(body)
                fake.now += 1
                fake.most_at_once = max(fake.most_at_once, fake.now)
            time.sleep(fake.delay)
            with fake.lock:
                fake.now -= 1
            if fake.is_killed:
                return None  # the connection ends without an answer
            if (status := fake.fail(number)) is not None:
                return self.reply(status, {"error": f"failure {number}"})
            return self.reply(200, fake.completion(body))

    return Handler
