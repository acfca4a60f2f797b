"""Owns writing with the target through vLLM servers, one or many.

Requests are sent by a thread with an event loop of its own, which lives as long as `answers` is iterated.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import httpx

from specdist.errors import ArtifactError, ConfigError
from specdist.generation.endpoint import Endpoint, Expected, TokenizerProbe
from specdist.generation.engine import Answer, Request
from specdist.generation.http_json import Unavailable
from specdist.generation.pool import Member, Pool
from specdist.generation.vllm_terms import VllmTerms, check_length

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CONNECT_SECONDS = 10.0


class _HttpThread:
    """A thread with an event loop and `client`, for as long as the block lasts; what still runs then is cancelled."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self._is_ready = threading.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="specdist-servers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.wait()
        return self

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self.client:
            self._is_ready.set()
            await self._end.wait()
            # Not the tasks that the client has for itself: those end with the ones that wait for them, and one that is
            # cancelled before its first step leaves a coroutine that was never awaited
            while tasks := list(self._tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run `work` until it is done or the block ends; may be called in any thread."""
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    async def _tracked(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None  # it runs as one
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


class ServerEngine:
    """The target behind vLLM servers. `max_in_flight` is of all together; a request goes to the least busy one."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None,
        target_names: Sequence[str],
        probes: Sequence[TokenizerProbe],
        eos_token_ids: Sequence[int],
        max_in_flight: int,
        timeout: float = 600.0,
        num_top_logprobs: int = 0,
        api_key: str | None = None,
        patience: float = 600.0,
    ) -> None:
        """Check every server: its model, tokenizer, chat template and answers. One that is down now may come later.

        `model` is its name there; None takes the one that is served as or from one of `target_names`. `probes`: one or
        more. `timeout` of one answer, and `patience` while no server is alive, in seconds.
        Raises ConfigError where `urls` are wrong, ArtifactError where a server is something else or none is up.
        """
        expected = Expected(model, target_names, probes, VllmTerms(tuple(eos_token_ids), num_top_logprobs))
        self._endpoints = [Endpoint(url, expected) for url in urls]
        if not urls or len({endpoint.url for endpoint in self._endpoints}) != len(urls):
            raise ConfigError(f"endpoints {list(urls)}: expected one or more, each once")
        self._max_in_flight, self._timeout, self._patience = max_in_flight, timeout, patience
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with _HttpThread(self._client()) as http:
            self._errors = http.start(self._check(http.client)).result()
        up = [endpoint for endpoint, error in zip(self._endpoints, self._errors, strict=True) if error is None]
        self._context_length = min(endpoint.context_length for endpoint in up)
        self.context_length: int | None = self._context_length
        self.name = f"vllm server {'+'.join(sorted({endpoint.version for endpoint in up}))}"

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(self._timeout, connect=CONNECT_SECONDS)
        return httpx.AsyncClient(limits=limits, timeout=timeout, headers=self._headers)

    async def _check(self, client: httpx.AsyncClient) -> list[str | None]:
        """Why each endpoint cannot be reached now, None for those that can be."""
        results = await asyncio.gather(*(e.check(client) for e in self._endpoints), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Unavailable):
                raise result
        down = [(e.url, str(r)) for e, r in zip(self._endpoints, results, strict=True) if r is not None]
        if len(down) == len(results):
            errors = "; ".join(f"{url}: {error}" for url, error in down)
            raise ArtifactError(f"no server answers ({errors}); start one, for example by: vllm serve TARGET")
        for url, error in down:
            logger.warning("server %s is down (%s); it is used when it is up", url, error)
        return [None if result is None else str(result) for result in results]

    def answers(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """See Engine. Raises ArtifactError where a request cannot be answered, or no server is left."""
        done: queue.SimpleQueue[Future[Answer]] = queue.SimpleQueue()
        in_flight = 0
        with _HttpThread(self._client()) as http:
            pool = http.start(self._pool(http)).result()
            while True:
                while in_flight < self._max_in_flight and (request := next_request()) is not None:
                    check_length(request, self._context_length, "serve the target with a larger --max-model-len")
                    http.start(pool.write(request)).add_done_callback(done.put)
                    in_flight += 1
                if not in_flight:
                    return
                answer = done.get().result()
                in_flight -= 1
                yield answer

    async def _pool(self, http: _HttpThread) -> Pool:
        members = [Member(e, error) for e, error in zip(self._endpoints, self._errors, strict=True)]
        return Pool(members, http.client, self._context_length, self._patience, http.start)

    def close(self) -> None:
        """Nothing: connections end with `answers`."""
