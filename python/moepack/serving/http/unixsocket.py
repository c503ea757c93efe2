"""Listens on a Unix socket, whose file permissions decide who may connect.

Invariant: only a socket without a listener is replaced, and only the server's own socket is removed.
"""

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moepack.errors import LoadError
from moepack.system import files, sockets

__all__ = ["PREFIX", "unix_path", "unix_socket"]

PREFIX = "unix:"
"""The start of a host that names a Unix socket."""
MASK = 0o117
"""Removed permissions: the owner and the group of the socket may connect."""


def unix_path(host: str) -> Path | None:
    """Return the path in a host of the form `unix:PATH`; None for other hosts.

    Raises:
        ValueError: the path is empty.
    """
    if not host.startswith(PREFIX):
        return None
    if host == PREFIX:
        raise ValueError(f"--host {PREFIX} needs a path: {PREFIX}/run/moepack/socket")
    return Path(host.removeprefix(PREFIX))


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a socket; remove its file at the end.

    Raises:
        LoadError: another server listens there, the path is another kind of file, or it cannot be created.
    """
    if not sockets.HAS_UNIX:
        raise LoadError(f"{path}: cannot listen there: this system has no Unix sockets")
    _remove_stale(path)
    listener = sockets.stream()
    try:
        sockets.bind_unix(listener, str(path), MASK)
    except OSError as error:
        listener.close()
        raise LoadError(f"{path}: cannot listen there: {error.strerror or error}") from error
    own = _identity(path)
    try:
        yield listener
    finally:
        listener.close()
        with suppress(FileNotFoundError):
            if _identity(path) == own:
                files.remove(path)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_stale(path: Path) -> None:
    """Remove the socket that an earlier server left."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise LoadError(f"{path}: cannot listen there: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise LoadError(f"{path}: cannot listen there: the file exists and is not a socket")
    with sockets.stream() as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            files.remove(path, missing_ok=True)
            return
        except OSError as error:  # a full backlog, or no permission: there is a listener
            raise LoadError(f"{path}: cannot listen there: {error.strerror or error}") from error
    raise LoadError(f"{path}: another server listens there")
