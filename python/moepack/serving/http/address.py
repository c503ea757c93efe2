"""The address that a server is going to listen on, checked before the model is loaded."""

import socket

from moepack.errors import LoadError
from moepack.serving.http.unixsocket import unix_path
from moepack.system import sockets

__all__ = ["require_free"]


def require_free(host: str, port: int) -> None:
    """Check that a server can listen on all addresses of a host: bind a socket to each, and close it.

    The path of a Unix socket passes: `unix_socket` checks it.

    Raises:
        LoadError: the host is unknown or not this machine, the port is in use, or it needs more rights.
    """
    if unix_path(host) is not None:
        return
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            try:
                probe = socket.socket(family, kind, protocol)
            except OSError:  # the system lacks the family, and the server leaves it out as well
                continue
            with probe:
                sockets.reuse(probe)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(f"{name}: cannot listen there: {reason}") from error
