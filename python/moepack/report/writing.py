"""`moepack report`: writes the page and the model card of a packed directory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from moepack.checkpoint import Checkpoint
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import MoepackError
from moepack.evaluation.models import Progress
from moepack.format import PackedDirectory
from moepack.format.atomic import write_file
from moepack.integrations.loading import is_packed
from moepack.report.card import CARD, read_source, render_card
from moepack.report.experts import read_values
from moepack.report.facts import Facts
from moepack.report.page import render_page
from moepack.report.quality import Quality, measure

__all__ = ["PAGE", "ReportFiles", "write_report"]

PAGE = "report.html"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@.+)?", re.ASCII)


@dataclass(frozen=True)
class ReportFiles:
    """The written page and model card, and the measured quality."""

    page: Path
    card: Path
    quality: Quality | None


def write_report(
    directory: str | PathLike[str],
    reference: str | PathLike[str] | None = None,
    text: str | PathLike[str] | None = None,
    *,
    chars: int = 250_000,
    prompts: Sequence[str] = (),
    base_model: str | None = None,
    progress: Progress | None = None,
) -> ReportFiles:
    """Write `report.html` and `README.md` into a packed directory.

    Both are side files, which `verify` lists separately. The existing README.md (the original's card, copied by
    `compress`) is kept below the new card, and its license in the front matter.

    Args:
        directory: the packed directory.
        reference: the original: a directory or Hub id; or a recorded reference, which gives no weight errors and no
            texts.
        text: evaluation text, UTF-8. Without it, only sizes and errors are reported.
        chars: number of characters to use.
        prompts: prompts that both models continue; default: excerpts of the text.
        base_model: Hub id of the original; default: `reference` if it is an id.
        progress: as for `evaluate`.

    Raises:
        LoadError, CorruptionError: the directory cannot be opened.
        ValueError: the text is shorter than one window.
        DiskError: a file cannot be written.
    """
    place = Path(directory)
    opened = PackedDirectory.open(place)
    original = None if reference is None or Path(reference).is_file() else resolve_model(reference)
    quality = None if text is None else measure(place, Path(text), chars, reference, prompts, progress)
    base = base_model or _hub_id(reference)
    values, seq2seq = read_values(opened, _source(original)), bool(opened.config.get("is_encoder_decoder"))
    facts = Facts(_name(base, original, place), base, opened.manifest, seq2seq, values, quality)
    card = render_card(facts, read_source(place, *([] if original is None else [original])))
    write_file(place / PAGE, render_page(facts).encode())
    write_file(place / CARD, card.encode())
    return ReportFiles(place / PAGE, place / CARD, quality)


def _hub_id(reference: str | PathLike[str] | None) -> str | None:
    """Return the Hub id of a model without its revision; None for a directory."""
    given = "" if reference is None or Path(reference).exists() else fspath(reference)
    return given.partition("@")[0] if _HUB_ID.fullmatch(given) else None


def _name(base: str | None, original: Path | None, place: Path) -> str:
    return base.rpartition("/")[2] if base else (original or place).resolve().name


def _source(original: Path | None) -> Checkpoint | None:
    """Return the original's checkpoint, if it is unpacked and readable."""
    try:
        return None if original is None or is_packed(original) else open_checkpoint(original)
    except MoepackError:
        return None
