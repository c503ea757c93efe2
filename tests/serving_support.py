"""A server in this process, for tests that speak to it over HTTP."""

import shutil
import threading
import time
from contextlib import contextmanager

import uvicorn

from tiny_models import TEMPLATE


@contextmanager
def running(app):
    """A server of an app at a free port of this machine; its port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def happens(condition):
    """Whether a condition holds within 20 seconds."""
    until = time.monotonic() + 20
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def is_idle(engine):
    """Whether an engine ends everything that it does within 20 seconds."""
    return happens(lambda: not engine.counts()["active"] and not engine.counts()["waiting"])


def templated(packed, directory):
    """A copy of a packed model with a chat template; its directory."""
    shutil.copytree(packed, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
