"""Settings of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: model name in the API.
        source: the model's directory, whose files must not change; None for a model without one.
        api_key: API key that clients must send; None accepts every client.
        answer: maximum answer tokens if a request sets none.
        body: maximum size of a request body in bytes.
        hosts: accepted host names in lower case, empty for any. They prevent web pages from reaching the server under
            a name of their own (DNS rebinding).
        origins: origins whose web pages may send requests, such as `https://example.org`; `*` for all.
        template: chat template that replaces the model's.
        variables: variables of the chat template for every request that does not set them.
        sampling: settings of `Sampling` for every request that does not set them.
        log_prompts: whether the bodies of requests are logged. Otherwise the log holds nothing of them.

    Raises:
        ValueError: the name is not Unicode text, so no client could send it.
    """

    name: str
    source: Path | None = None
    api_key: str | None = None
    answer: int = 512
    body: int = 4 << 20
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    log_prompts: bool = False

    def __post_init__(self) -> None:
        try:
            self.name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the model name {self.name!r} is not Unicode text; choose another") from error
