"""What a server is told when it is started."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: of the model, as clients call it.
        source: the model's directory, whose files must stay what they were; None for a model that has none.
        api_key: what clients must send; None lets everybody in.
        answer: tokens of an answer where the client does not say.
        body: the most bytes of a request.
        hosts: names that the server may be asked by, so that no page can reach it under a name of its own (DNS
            rebinding); in lower case, empty for any.

    Raises:
        ValueError: the name is no Unicode text, so that no client could write it.
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
            raise ValueError(f"the model's name is no Unicode text: {self.name!r}; give it another") from error
