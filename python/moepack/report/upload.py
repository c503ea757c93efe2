"""Uploads a packed directory to the Hub, with a model card."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from moepack.checkpoint.resolve import hub_reason
from moepack.errors import TextError, UploadError
from moepack.format import PackedDirectory
from moepack.report.card import CARD, is_own_card
from moepack.report.writing import write_report
from moepack.textfile import read_text

__all__ = ["push"]

SKIPPED = (".*", "*.partial", "__pycache__")
"""Patterns of files that are not uploaded."""


def push(
    directory: str | PathLike[str], name: str, *, private: bool = False, base_model: str | None = None
) -> tuple[str, str]:
    """Upload a packed directory. A directory without a card of `write_report` gets one.

    Args:
        directory: the packed directory.
        name: `ORGANIZATION/NAME`; the repository is created if it does not exist.
        private: create a private repository.
        base_model: Hub id of the original, for a new card.

    Returns:
        The address of the model and of the commit.

    Raises:
        LoadError, CorruptionError: the directory is not a packed directory.
        UploadError: the Hub denies access or cannot be reached.
    """
    import huggingface_hub

    place = Path(directory)
    PackedDirectory.open(place)
    try:
        described = is_own_card(read_text(place / CARD))
    except (OSError, TextError):
        described = False
    if not described:
        write_report(place, base_model=base_model)
    api = huggingface_hub.HfApi()
    try:
        made = api.create_repo(name, private=private, exist_ok=True)
        message = "Upload a model packed by moepack"
        done = api.upload_folder(
            folder_path=place, repo_id=made.repo_id, commit_message=message, ignore_patterns=list(SKIPPED)
        )
    except (OSError, ValueError) as error:
        raise UploadError(f"cannot be uploaded to '{name}': {hub_reason(error)}", file=place) from error
    return str(made), done.commit_url
