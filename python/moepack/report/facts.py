"""The facts about a packed model for page and card."""

from dataclasses import dataclass
from functools import cached_property

from moepack.format import Manifest
from moepack.report.contents import RoleSize, Row, add_up, read_rows, role_sizes
from moepack.report.experts import TensorValues
from moepack.report.quality import Quality
from moepack.units import size

__all__ = ["Facts"]


@dataclass(frozen=True)
class Facts:
    """The facts about a packed model.

    Attributes:
        name: name of the model.
        base_model: Hub id of the original, or None if unknown.
        manifest: manifest of the directory.
        seq2seq: whether the model is an encoder-decoder.
        values: values of each expert of each packed tensor.
        quality: measured quality, or None.
    """

    name: str
    base_model: str | None
    manifest: Manifest
    seq2seq: bool
    values: list[TensorValues]
    quality: Quality | None

    @cached_property
    def rows(self) -> list[Row]:
        """The packed tensors."""
        return read_rows(self.manifest)

    @cached_property
    def roles(self) -> list[RoleSize]:
        """Sizes by role."""
        return role_sizes(self.manifest)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Total bytes of the directory before and after."""
        directory = add_up(self.manifest, self.rows)["directory"]
        return directory["before"], directory["after"]

    @property
    def bits_per_weight(self) -> float:
        """Average bits per weight over all packed tensors."""
        weights = sum(role.weights for role in self.roles)
        return 8 * sum(row.after for row in self.rows) / max(weights, 1)

    @property
    def settings(self) -> str:
        """The method's settings in one line."""
        chosen = ((key, value) for key, value in self.manifest.settings.items() if not key.endswith("sha256"))
        return ", ".join(f"{key} {value}" for key, value in chosen if value not in ("", None))

    def summary(self) -> str:
        """Summarize size and quality in two sentences."""
        before, after = self.sizes
        text = f"{size(before)} became {size(after)}, {before / max(after, 1):.2f} times smaller"
        text += f", at {self.bits_per_weight:.2f} bits per packed weight."
        figures = None if self.quality is None else self.quality.figures
        if figures is None or self.quality is None:
            return text
        if figures.reference_loss is None:
            return f"{text} Its loss on {self.quality.text} is {figures.loss:.3f} nats per token."
        change = figures.loss - figures.reference_loss
        return (
            f"{text} On {self.quality.text} its loss is {abs(change):.3f} nats per token "
            f"{'higher' if change >= 0 else 'lower'} than the original's, and both rank the same token first "
            f"{figures.top1_agreement:.1%} of the time."
        )
