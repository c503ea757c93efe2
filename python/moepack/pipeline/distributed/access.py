"""Tests whether a Ray cluster accepts this machine before the driver connects, and explains a rejection.

A separate process (`attempt`) connects first, with short timeouts. A cluster that was started with a token requires
that token from every driver, and a driver sends it only if `RAY_AUTH_MODE` is `token`. If that variable is unset, the
first attempt uses no token, and a second one uses it if the cluster requires one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moepack.errors import ClusterError

__all__ = ["AUTH_MODE", "reach"]

AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_VALUE, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT_TOKEN = Path(".ray", "auth_token")
"""Path of the token file, relative to the home directory."""

ATTEMPT = Path(__file__).with_name("attempt.py")

MAX_PORT = 65535

KNOCK = 10.0
"""Timeout in seconds of a TCP connection."""

DEADLINE = 60.0
"""Timeout in seconds of an attempt, including process start."""

TIMEOUTS = {
    "RAY_NUM_REDIS_GET_RETRIES": "1",
    "RAY_gcs_rpc_server_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_gcs_server_request_timeout_seconds": "5",
}
"""Ray settings of an attempt. By default, Ray retries a rejected request for 20 seconds, searches this machine for a
node for 60 seconds, and tries to talk to a server that is not Ray's for 800 seconds."""


class Failure(NamedTuple):
    """The reason why an attempt failed.

    Attributes:
        messages: messages of the error and its causes, outermost first; empty if Ray ended the process or it timed out.
        log: standard error of the process.
    """

    messages: list[str]
    log: str

    def says(self, *words: str) -> bool:
        """Return whether the messages or the log contain any of `words`."""
        text = "\n".join([*self.messages, self.log])
        return any(word in text for word in words)

    @property
    def unauthenticated(self) -> bool:
        """Whether the cluster required a token and did not get a valid one."""
        return self.says("AuthenticationError", "Unauthenticated")


def reach(address: str) -> dict[str, str]:
    """Connect once to the cluster at `address`; return the environment variables that a driver needs.

    Raises:
        ClusterError: no cluster at `address` accepts this machine; the message says why.
    """
    try:
        _knock(address)
    except (OSError, ValueError) as error:
        raise _refusal(address, str(error)) from error
    needed: dict[str, str] = {}
    failure = _attempt(address, needed)
    if failure is not None and failure.unauthenticated and AUTH_MODE not in os.environ:
        needed = {AUTH_MODE: "token"}
        failure = _attempt(address, needed)
    if failure is not None:
        raise _refusal(address, _reason(failure, address))
    return needed


def _refusal(address: str, reason: str) -> ClusterError:
    return ClusterError(f"cannot connect to a Ray cluster: {reason}", file=address)


def _knock(address: str) -> None:
    """Check that a server listens at the address HOST:PORT.

    Raises:
        OSError: no server listens.
        ValueError: PORT is not a port.
    """
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        if not port.isdecimal() or int(port) > MAX_PORT:
            raise ValueError(f"'{port}' is not a port")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK):
            pass


def _attempt(address: str, needed: Mapping[str, str]) -> Failure | None:
    """Connect in a separate process with the variables `needed`; return None on success."""
    environment = {**os.environ, **TIMEOUTS, **needed}
    command = [sys.executable, "-P", str(ATTEMPT), address]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=DEADLINE
        )
    except subprocess.TimeoutExpired:
        return Failure([], "")
    if done.returncode:
        return Failure([], done.stderr)
    messages: list[str] = json.loads(done.stdout.splitlines()[-1])
    return Failure(messages, done.stderr) if messages else None


def _reason(failure: Failure, address: str) -> str:
    """Explain why an attempt failed, and how to fix it."""
    if failure.unauthenticated:
        return _token_reason()
    if failure.says("No node info found"):
        return f"this machine is not a node of it: run `ray start --address={address}` here first"
    if not failure.messages:
        return (
            "a server listens there, but it does not answer like a Ray cluster: "
            "give the address that `ray start --head` prints"
        )
    # Some of Ray's messages contain a traceback; the last line states the error.
    kind, _, message = failure.messages[0].partition(": ")
    if kind == "ConnectionError" and len(failure.messages) > 1:
        message = failure.messages[1].rstrip().splitlines()[-1]
    return " ".join(message.split())


def _token_reason() -> str:
    """Explain what is wrong with this machine's token, in the order in which Ray looks for one."""
    mode = os.environ.get(AUTH_MODE, "token")
    if mode.lower() not in ("token", "k8s"):
        return f"it requires a token, but {AUTH_MODE} is '{mode}' here: unset it"
    if os.environ.get(TOKEN_VALUE):
        return f"it does not accept the token in {TOKEN_VALUE}: set the token of the cluster's other machines"
    file = Path(os.environ[TOKEN_PATH]) if TOKEN_PATH in os.environ else Path.home() / DEFAULT_TOKEN
    try:
        if file.read_text(encoding="utf-8").strip():
            return f"it does not accept the token in {file}: copy that of the cluster's other machines"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
    else:
        reason = "is empty"
    return f"it requires a token, but this machine has none ({file}: {reason}): copy it from a machine of the cluster"
