"""What a request must be before anything looks at it: by somebody with the key, JSON, and not too large.

Bodies must be declared as JSON: browsers then ask before a page of another site may send one, and nothing here tells
them they may.
"""

import hmac

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.serving.refusal import Refusal
from moepack.serving.settings import Settings

__all__ = ["Bounds"]

JSON_TYPE = "application/json"


class Bounds:
    """Lets in who has the key, sends JSON, and not too much of it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as ASGI asks."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        refusal = self._refusal(request)
        body = b"" if refusal else await self._body(receive)
        if body is None:
            refusal = Refusal(413, f"a request has at most {self.settings.body} bytes", "too_large")
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return await self.app(scope, replay, send)

    def _refusal(self, request: Request) -> Refusal | None:
        key, given = self.settings.api_key, request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return Refusal(401, "the API key is missing or wrong", "invalid_api_key", "authentication_error")
        if request.method == "POST" and request.headers.get("content-type", "").split(";")[0].strip() != JSON_TYPE:
            return Refusal(415, f"a request's content-type is {JSON_TYPE}", "content_type")
        return None

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None where it is too large or the client has gone."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self.settings.body:
                return None
        return b"".join(parts)
