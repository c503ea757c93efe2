"""Shared fixtures of the server's tests; a module may replace them by its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moepack.integrations.loading import open_model, open_tokenizer


@pytest.fixture(scope="module")
def model(packed: Path) -> Any:
    """The packed model, with results that do not depend on the number of tokens."""
    return open_model(packed, "float32", mode="exact")


@pytest.fixture(scope="module")
def tokenizer(packed: Path) -> Any:
    return open_tokenizer(packed)


@pytest.fixture(scope="module")
def engine(packed: Path) -> Iterator[Any]:
    from request_support import engine_of  # needs the extra `serve`

    with engine_of(packed) as engine:
        yield engine


@pytest.fixture(scope="module")
def ask(engine: Any) -> Iterator[Any]:
    """A function that sends one request to an application in this process."""
    from request_support import asking

    with asking(engine) as ask:
        yield ask
