"""Owns the spreading of requests over servers: which one is next, retries, servers that die and come back."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from specdist.errors import ArtifactError
from specdist.generation.endpoint import Endpoint
from specdist.generation.engine import Answer, Request
from specdist.generation.http_json import Unavailable
from specdist.progress import format_seconds

logger = logging.getLogger(__name__)

FAILURES_TO_DIE = 3  # in a row
MAX_ATTEMPTS = 8  # of one request, not counting those that reached no server
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0  # before a request's next attempt
FIRST_RECHECK_SECONDS, LONGEST_RECHECK_SECONDS = 5.0, 60.0  # of a dead server


class Member:
    """A server in a pool; one with an error is dead."""

    def __init__(self, endpoint: Endpoint, error: str | None) -> None:
        self.endpoint, self.error = endpoint, error
        self.busy = self.failures = 0  # requests there now; failures in a row

    @property
    def is_alive(self) -> bool:
        return self.error is None


class Pool:
    """Servers at work for one context length, in tokens. Everything happens in one event loop."""

    def __init__(
        self,
        members: list[Member],
        client: httpx.AsyncClient,
        context_length: int,
        patience: float,
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`patience`: seconds without any server after which work fails. `start` runs what goes on beside requests."""
        self.members, self.context_length, self.patience = members, context_length, patience
        self._client, self._start = client, start
        self._some_alive = asyncio.Event()
        self._last_death = time.monotonic()
        for member in members:
            if member.is_alive:
                self._some_alive.set()
            else:
                start(self._recheck(member))

    async def write(self, request: Request) -> Answer:
        """The answer, from whichever server gives it. Raises ArtifactError where none does in the end."""
        jitter = random.Random(request.seed)
        attempts, wait = 0, FIRST_WAIT_SECONDS
        avoid: Member | None = None
        while True:
            member = await self._choose(avoid)
            member.busy += 1
            try:
                answer = await member.endpoint.complete(self._client, request)
            except Unavailable as error:
                self._note_failure(member, error)
                attempts += error.is_reached
                if attempts == MAX_ATTEMPTS:
                    raise ArtifactError(
                        f"row {request.key}: {attempts} attempts failed, the last at {member.endpoint.url} ({error}); "
                        "see the server's log; finished rows are safe, start again to go on"
                    ) from error
            else:
                member.failures = 0
                return answer
            finally:
                member.busy -= 1
            avoid = member
            await asyncio.sleep(wait * jitter.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _choose(self, avoid: Member | None) -> Member:
        """The least busy server that is alive, another one than `avoid` if there is one."""
        while not (alive := [member for member in self.members if member.is_alive]):
            left = self._last_death + self.patience - time.monotonic()
            if left <= 0:
                errors = "; ".join(f"{m.endpoint.url}: {m.error}" for m in self.members)
                raise ArtifactError(
                    f"no server has answered for {format_seconds(self.patience)} ({errors}); start one of them; "
                    "finished rows are safe, start again to go on"
                )
            try:
                await asyncio.wait_for(self._some_alive.wait(), left)
            except TimeoutError:
                continue
        return min(alive, key=lambda member: (member is avoid, member.busy))

    def _note_failure(self, member: Member, error: Unavailable) -> None:
        member.failures += 1
        logger.info("server %s: %s", member.endpoint.url, error)
        if not member.is_alive or member.failures < FAILURES_TO_DIE:
            return
        member.error = str(error)
        others = sum(other.is_alive for other in self.members)
        logger.warning(
            "server %s failed %d times in a row (%s) and is tried again later; %d others go on",
            member.endpoint.url,
            member.failures,
            error,
            others,
        )
        if not others:
            self._some_alive.clear()
            self._last_death = time.monotonic()
        self._start(self._recheck(member))

    async def _recheck(self, member: Member) -> None:
        """Wait until a dead server is back, and is what it must be."""
        wait, endpoint = FIRST_RECHECK_SECONDS, member.endpoint
        while True:
            await asyncio.sleep(wait)
            try:
                await endpoint.check(self._client, self.context_length)
            except (Unavailable, ArtifactError) as error:
                if str(error) != member.error:
                    logger.warning("server %s is not used: %s", endpoint.url, error)
                member.error = str(error)
                wait = min(2 * wait, LONGEST_RECHECK_SECONDS)
            else:
                break
        logger.warning("server %s is back", endpoint.url)
        member.failures, member.error = 0, None
        self._some_alive.set()
