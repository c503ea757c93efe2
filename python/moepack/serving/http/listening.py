"""Runs the HTTP server until Ctrl-C or SIGTERM, then lets running answers end."""

import asyncio
import socket
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from moepack.serving.engine import Engine
from moepack.serving.http.refusal import Refusal

__all__ = ["listen"]

PATIENCE = 5.0
"""Seconds that running answers may take after the server is asked to stop."""


class _Server(uvicorn.Server):
    """A uvicorn server that closes the engine before the connections, so that every answer ends properly."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End answers, then connections."""
        await asyncio.to_thread(self._engine.close, PATIENCE)
        await super().shutdown(sockets)


class _Protocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """Answers malformed HTTP (no Host, a header above 64 KiB) in OpenAI's format. It never reaches the application."""

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection. A response that has started is cut off."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            response = Refusal(400, "the request is not valid HTTP", "invalid_http").response()
            headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
            head = b"HTTP/1.1 400 Bad Request\r\n" + headers + b"connection: close\r\n\r\n"
            self.transport.write(head + bytes(response.body))
        self.transport.close()


def listen(app: FastAPI, engine: Engine, host: str, port: int) -> None:
    """Serve requests until the process is asked to stop.

    Args:
        app: the application returned by `create_app`.
        engine: the engine of the application; closed at the end.
        host: address to listen on.
        port: port to listen on; 0 picks a free one.
    """
    # With WebSockets off, an upgrade request is an ordinary GET and is answered like any other.
    config = uvicorn.Config(
        app, host=host, port=port, log_level="info", timeout_graceful_shutdown=1, http=_Protocol, ws="none"
    )
    with suppress(KeyboardInterrupt):
        _Server(config, engine).run()
