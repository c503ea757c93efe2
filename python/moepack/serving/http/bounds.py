"""Checks the host, the API key and the size of a request before anything else reads it.

Only `/health`, the files of the page and OPTIONS, which browsers send without a key, are answered without it.
"""

import asyncio
import hmac
import logging
import re

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.serving.http.page import PATHS
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.settings import Settings

__all__ = ["OPEN", "Bounds", "has_key"]

OPEN = ("/health", *PATHS)
"""Paths that need no API key."""
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")
"""Matches a `Host` header: a name or an address, and a port."""

BODY_SECONDS = 60.0
"""Maximum seconds for a body to arrive."""
BODIES = 32
"""Maximum memory of bodies that have not arrived completely, in bodies of the maximum size."""

_LOG = logging.getLogger("uvicorn.error")


class Bounds:
    """Middleware that accepts only requests for an allowed host, with the API key and of bounded size."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self._arriving = 0  # bytes of bodies that have not arrived completely

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            return await refusal.response(scope["path"])(scope, receive, send)
        if scope["method"] == "OPTIONS":
            return await Response(status_code=204, headers={"Allow": "GET, POST, OPTIONS"})(scope, receive, send)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(receive)
        except TimeoutError:
            return await _late().response(scope["path"])(scope, receive, send)
        except Refusal as refused:
            return await refused.response(scope["path"])(scope, receive, send)
        if body is None:  # the client has disconnected
            return None
        if self.settings.log_prompts and body:
            _LOG.info("%s %s: %s", scope["method"], scope["path"], body.decode("utf-8", "backslashreplace"))
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return await self.app(scope, replay, send)

    def _refusal(self, request: Request) -> Refusal | None:
        if self.settings.hosts and not self._is_for_us(request):
            return Refusal(400, f"the host must be one of {', '.join(self.settings.hosts)}", "wrong_host")
        is_open = request.scope["path"] in OPEN or request.method == "OPTIONS"
        if not is_open and not has_key(request, self.settings):
            wrong = "the API key is missing or wrong"
            headers = {"WWW-Authenticate": "Bearer"}
            return Refusal(401, wrong, "invalid_api_key", "authentication_error", headers=headers)
        return None

    def _is_for_us(self, request: Request) -> bool:
        host = HOST.fullmatch(request.headers.get("host", "").lower())
        return host is not None and host[1].rstrip(".") in self.settings.hosts

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body. Return None if the client disconnects.

        Raises:
            Refusal: the body exceeds the size limit, or bodies that arrive exceed `BODIES` times the limit together.
        """
        parts, size, more = [], 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._arriving += len(parts[-1])
                more = message.get("more_body", False)
                if size > self.settings.body:
                    raise Refusal(413, f"the request is larger than {self.settings.body} bytes", "too_large")
                if self._arriving > BODIES * self.settings.body:
                    raise Refusal(503, "the server is receiving too many requests", "overloaded", "server_error")
            return b"".join(parts)
        finally:
            self._arriving -= size


def _late() -> Refusal:
    message = f"the body of the request did not arrive within {BODY_SECONDS:g} seconds"
    return Refusal(408, message, "timeout", headers={"Connection": "close"})


def has_key(request: Request, settings: Settings) -> bool:
    """Return whether a request has the API key, compared in constant time; True if none is set."""
    if settings.api_key is None:
        return True
    key = settings.api_key.encode("utf-8", "surrogateescape")
    given = request.headers.get("authorization", "").encode("latin-1")  # ASGI headers are bytes, one per character
    other = request.headers.get("x-api-key", "").encode("latin-1")  # Anthropic's clients
    return hmac.compare_digest(given, b"Bearer " + key) | hmac.compare_digest(other, key)
