"""Owns JSON over HTTP with one server: which failures may pass, which are errors, and checked fields of replies."""

from typing import Any, TypeVar

import httpx

from specdist.errors import ArtifactError, ConfigError
from specdist.redaction import without_credentials

Kind = TypeVar("Kind")

_TRY_AGAIN = (408, 425, 429)  # and all of 500 and above
_SHOWN = 500  # characters of a server's own words in a message


class Unavailable(Exception):
    """A server could not answer now, and may later. `is_reached`: it had the request when it failed."""

    def __init__(self, message: str, *, is_reached: bool) -> None:
        super().__init__(message)
        self.is_reached = is_reached


class JsonServer:
    """A server by its URL."""

    def __init__(self, url: str) -> None:
        """A trailing /v1, which OpenAI's clients want, is dropped. Raises ConfigError where `url` is none."""
        self._address = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.url = without_credentials(self._address)  # as it may be shown
        try:
            parsed = httpx.URL(self._address)
        except httpx.InvalidURL as error:
            raise ConfigError(f"endpoint {self.url!r}: {error}; expected something like http://host:8000") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"endpoint {self.url!r}: expected something like http://host:8000")

    async def get(self, client: httpx.AsyncClient, path: str) -> dict[str, Any]:
        """The reply's JSON object. Raises Unavailable, or ArtifactError where asking again would not help."""
        return await self._call(client, "GET", path, None)

    async def post(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply's JSON object; fields of `body` that are None are not sent. Raises as `get`."""
        return await self._call(client, "POST", path, {key: value for key, value in body.items() if value is not None})

    async def _call(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        try:
            response = await client.request(method, self._address + path, json=body)
        except httpx.RequestError as error:
            is_reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise Unavailable(f"{type(error).__name__}: {error}".rstrip(": "), is_reached=is_reached) from error
        where, text = f"endpoint {self.url}: {method} {path}", response.text[:_SHOWN]
        if response.status_code in _TRY_AGAIN or response.status_code >= 500:
            raise Unavailable(f"HTTP {response.status_code}: {text}", is_reached=response.status_code >= 500)
        if not response.is_success:
            remedy = "; vLLM knows this path, and a gateway before it must let it pass" * (response.status_code == 404)
            raise ArtifactError(f"{where}: HTTP {response.status_code}: {text}{remedy}")
        try:
            reply = response.json()
        except ValueError as error:
            raise ArtifactError(f"{where}: expected JSON, got {text!r}; is it a vLLM server?") from error
        if not isinstance(reply, dict):
            raise ArtifactError(f"{where}: expected a JSON object, got {text!r}; is it a vLLM server?")
        return reply

    def field(self, reply: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
        """A field of a reply. Raises ArtifactError where it is missing or of another type."""
        if not isinstance(value := reply.get(name), kind):
            raise ArtifactError(
                f"endpoint {self.url}: expected {name} ({kind.__name__}) in its reply, got {value!r} "
                f"(it has {sorted(reply)}); is it a vLLM server?"
            )
        return value
