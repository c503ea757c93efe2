"""Lets web pages of chosen origins send requests (CORS).

A browser asks with OPTIONS before a page may post JSON to another origin. Without a permitted origin the answer has no
CORS headers, so the browser sends nothing.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.serving.http.settings import Settings

__all__ = ["Origins"]

AGE = 600
"""Seconds that a browser may remember a permission."""


class Origins:
    """Middleware that adds CORS headers to every answer for a permitted origin, errors included."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self._origins = app, {origin.rstrip("/").lower() for origin in settings.origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http" or not self._origins:
            return await self.app(scope, receive, send)
        asked = Headers(scope=scope)
        origin = asked.get("origin", "")
        allowed = "*" if "*" in self._origins else origin if origin.lower() in self._origins else None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if allowed != "*":
                    headers.add_vary_header("Origin")
                if allowed and origin:
                    headers["Access-Control-Allow-Origin"] = allowed
                    headers["Access-Control-Expose-Headers"] = "*"
                    if scope["method"] == "OPTIONS":
                        _permit(headers, asked)
            await send(message)

        return await self.app(scope, receive, send_with_headers)


def _permit(headers: MutableHeaders, asked: Headers) -> None:
    """Permit what a browser asks for before a request."""
    headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
    headers["Access-Control-Allow-Headers"] = asked.get("access-control-request-headers", "*")
    headers["Access-Control-Max-Age"] = str(AGE)
    if asked.get("access-control-request-private-network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
