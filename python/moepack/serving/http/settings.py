"""Settings of a server."""

from dataclasses import dataclass
from pathlib import Path

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

    Raises:
        ValueError: the name is not Unicode text, so no client could send it.
    """

    name: str
    source: Path | None = None
    api_key: str | None = None
    answer: int = 512
    body: int = 4 << 20
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            self.name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the model name {self.name!r} is not Unicode text; choose another") from error
