"""Sockets, where systems differ: Unix sockets, which Python lacks on Windows, and the reuse of addresses."""

import os
import socket
import sys

__all__ = ["HAS_UNIX", "bind_unix", "datagram", "reuse", "stream"]

HAS_UNIX = sys.platform != "win32"
"""Whether the system has Unix sockets. `stream`, `datagram` and `bind_unix` must not be called without."""


if sys.platform == "win32":

    def _unix(kind: int) -> socket.socket:
        raise OSError("Windows has no Unix sockets")

    def _reuse(listener: socket.socket) -> None:
        pass  # the option would take an address from another program

else:

    def _unix(kind: int) -> socket.socket:
        return socket.socket(socket.AF_UNIX, kind)  # not inherited by child processes

    def _reuse(listener: socket.socket) -> None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def stream() -> socket.socket:
    """Return a Unix socket for connections."""
    return _unix(socket.SOCK_STREAM)


def datagram() -> socket.socket:
    """Return a Unix socket for messages."""
    return _unix(socket.SOCK_DGRAM)


def reuse(listener: socket.socket) -> None:
    """Let a socket bind to an address whose last connections have not expired yet."""
    _reuse(listener)


def bind_unix(listener: socket.socket, path: str, removed: int) -> None:
    """Bind a socket to a path.

    Args:
        listener: the socket.
        path: a path where no file is.
        removed: permissions that the file never has, not even for a moment.
    """
    mask = os.umask(removed)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
