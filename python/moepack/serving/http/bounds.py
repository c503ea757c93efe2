"""Checks the host, the API key and the size of a request before anything else reads it.

Only `/health` is answered without the key.
"""

import hmac
import re

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.serving.http.refusal import Refusal
from moepack.serving.http.settings import Settings

__all__ = ["OPEN", "Bounds", "has_key"]

OPEN = ("/health",)
"""Paths that need no API key."""
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")
"""Matches a `Host` header: a name or an address, and a port."""


class Bounds:
    """Middleware that accepts only requests for an allowed host, with the API key and of bounded size."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        body = await self._body(receive)
        if body is None:  # the client has disconnected
            return None
        if len(body) > self.settings.body:
            refusal = Refusal(413, f"the request is larger than {self.settings.body} bytes", "too_large")
            return await refusal.response()(scope, receive, send)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return await self.app(scope, replay, send)

    def _refusal(self, request: Request) -> Refusal | None:
        if self.settings.hosts and not self._is_for_us(request):
            return Refusal(400, f"the host must be one of {', '.join(self.settings.hosts)}", "wrong_host")
        if request.scope["path"] not in OPEN and not has_key(request, self.settings):
            wrong = "the API key is missing or wrong"
            headers = {"WWW-Authenticate": "Bearer"}
            return Refusal(401, wrong, "invalid_api_key", "authentication_error", headers=headers)
        return None

    def _is_for_us(self, request: Request) -> bool:
        host = HOST.fullmatch(request.headers.get("host", "").lower())
        return host is not None and host[1].rstrip(".") in self.settings.hosts

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body, up to just over the size limit. Return None if the client disconnects."""
        parts, size, more = [], 0, True
        while more and size <= self.settings.body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
        return b"".join(parts)


def has_key(request: Request, settings: Settings) -> bool:
    """Return whether a request has the API key; True if none is set."""
    if settings.api_key is None:
        return True
    given = request.headers.get("authorization", "").encode("latin-1")  # ASGI headers are bytes, one per character
    return hmac.compare_digest(given, b"Bearer " + settings.api_key.encode("utf-8", "surrogateescape"))
