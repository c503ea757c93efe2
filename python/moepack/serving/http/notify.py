"""Tells systemd about the state of the service (sd_notify), if it started this process."""

import os
from contextlib import suppress

from moepack.system.sockets import datagram

__all__ = ["notify"]


def notify(*states: str) -> None:
    """Send states such as `READY=1` to the service manager. Do nothing if there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract address
        address = "\0" + address[1:]
    # A manager that has gone must not end the server.
    with suppress(OSError), datagram() as manager:
        manager.sendto("\n".join(states).encode(), address)
