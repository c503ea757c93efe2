"""Runs the HTTP server until Ctrl-C or SIGTERM, then lets running answers end."""

import asyncio
import socket
from contextlib import nullcontext, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from moepack.memory import present_exempted
from moepack.serving.engine import Engine
from moepack.serving.http.notify import notify
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.unixsocket import unix_path, unix_socket
from moepack.system.interrupts import interrupt_on_termination
from moepack.system.processes import raise_open_files

__all__ = ["DRAIN", "listen"]

DRAIN = 5.0
"""Default seconds that running answers may take after the server is asked to stop."""

HEADER_SECONDS = 30.0
"""Maximum seconds for the header of a request to arrive."""
FILES = 65_536
"""Open files, and thus connections, that the server asks the system for."""


class _Server(uvicorn.Server):
    """A uvicorn server that tells systemd its state, and closes the engine before the connections.

    So every answer ends properly. A second Ctrl-C or SIGTERM ends the wait for running answers.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float) -> None:
        super().__init__(config)
        self._engine, self._drain = engine, drain
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        notify("READY=1", "STATUS=serving")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal; stop waiting at the second."""
        self._signals += 1
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End answers, then connections."""
        notify("STOPPING=1", "STATUS=running answers end")
        closing = asyncio.ensure_future(asyncio.to_thread(self._engine.close, self._drain))
        while not (await asyncio.wait({closing}, timeout=0.1))[0]:
            if self._signals > 1:
                await asyncio.to_thread(self._engine.close)
        await super().shutdown(sockets)


class _Protocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """Closes idle connections, and answers malformed HTTP, which never reaches the application, in OpenAI's format.

    Malformed are requests without a host and headers above 64 KiB. A connection is idle while no request is running;
    uvicorn itself closes connections that are idle after a request.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Expect a request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        """Close the connection in `HEADER_SECONDS`, unless a request is running by then."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection. A response that has started is cut off."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            response = Refusal(400, "the request is not valid HTTP", "invalid_http").response()
            headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
            head = b"HTTP/1.1 400 Bad Request\r\n" + headers + b"connection: close\r\n\r\n"
            self.transport.write(head + bytes(response.body))
        self.transport.close()


def listen(app: FastAPI, engine: Engine, host: str, port: int, drain: float = DRAIN) -> None:
    """Serve requests until the process is asked to stop.

    Args:
        app: the application returned by `create_app`.
        engine: the engine of the application; closed at the end.
        host: address to listen on, or `unix:PATH` for a Unix socket.
        port: port to listen on; 0 picks a free one. Unused with a Unix socket.
        drain: seconds that running answers may take after the process is asked to stop.

    Raises:
        LoadError: the Unix socket cannot be created.
    """
    path = unix_path(host)
    raise_open_files(FILES)
    # Uvicorn raises the signal again at the end. As a KeyboardInterrupt, it lets the process clean up.
    interrupt_on_termination()
    reached = nullcontext() if path is None else unix_socket(path)
    with present_exempted(), reached as listener, suppress(KeyboardInterrupt):
        # With WebSockets off, an upgrade request is an ordinary GET and is answered like any other.
        config = uvicorn.Config(
            app, host=host, port=port, log_level="info", timeout_graceful_shutdown=1, http=_Protocol, ws="none"
        )
        _Server(config, engine, drain).run(None if listener is None else [listener])
