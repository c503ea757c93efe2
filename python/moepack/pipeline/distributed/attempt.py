"""A script that connects to a Ray cluster once and prints error messages as a JSON list, outermost first.

It runs in its own process, because Ray's client retries for minutes, writes to standard error, and may end its process.
It imports nothing from moepack, so that it starts fast.
"""

import json
import logging
import sys

__all__ = ["attempt"]


def attempt(address: str) -> list[str]:
    """Connect to the cluster at `address` and disconnect; return the messages of an error and its causes."""
    try:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        ray.shutdown()
    except Exception as error:
        return _messages(error)
    return []


def _messages(error: BaseException | None) -> list[str]:
    messages = []
    while error is not None:
        messages.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return messages


if __name__ == "__main__":
    print(json.dumps(attempt(sys.argv[1])))
