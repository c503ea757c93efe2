"""Uploads a packed directory to the Hub, with a model card."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from moepack.checkpoint.hub_model import hub_model
from moepack.checkpoint.resolve import hub_failures, hub_reason
from moepack.errors import MoepackError, TextError, UploadError
from moepack.format import PackedDirectory
from moepack.pipeline.recipe import Recipe
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
        base_model: Hub id of the original, for a new card; None means that of the recipe.

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
        write_report(place, base_model=base_model or _original(place))
    api = huggingface_hub.HfApi()
    try:
        made = api.create_repo(name, private=private, exist_ok=True)
        message = "Upload a model packed by moepack"
        done = api.upload_folder(
            folder_path=place, repo_id=made.repo_id, commit_message=message, ignore_patterns=list(SKIPPED)
        )
    except hub_failures() as error:
        raise UploadError(f"cannot be uploaded to '{name}': {hub_reason(error)}", file=place) from error
    return str(made), done.commit_url


def _original(place: Path) -> str | None:
    """Return the Hub id of the repository that a packed directory was made from; None if its recipe names none."""
    try:
        source = Recipe.read(place).source
    except (OSError, MoepackError):
        return None
    found = None if source is None else hub_model(source.name)
    return None if found is None else found.name
