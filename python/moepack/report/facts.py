"""All that page and card tell of a packed model."""

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
    """A packed model as its report shows it.

    Attributes:
        name: what the model is called.
        base_model: the original's id on the hub, or None where it is unknown.
        manifest: of the directory.
        seq2seq: whether it is an encoder-decoder.
        values: of each expert of each packed tensor.
        quality: what was measured, or None.
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
        """Bytes of the directory before and after, everything counted."""
        directory = add_up(self.manifest, self.rows)["directory"]
        return directory["before"], directory["after"]

    @property
    def bits_per_weight(self) -> float:
        """Packed bits a weight, of all packed tensors together."""
        weights = sum(role.weights for role in self.roles)
        return 8 * sum(row.after for row in self.rows) / max(weights, 1)

    @property
    def settings(self) -> str:
        """The method's settings in a line."""
        chosen = ((key, value) for key, value in self.manifest.settings.items() if not key.endswith("sha256"))
        return ", ".join(f"{key} {value}" for key, value in chosen if value not in ("", None))

    def summary(self) -> str:
        """What became of the model, in two sentences."""
        before, after = self.sizes
        text = f"{size(before)} became {size(after)}, {before / max(after, 1):.2f} times smaller"
        text += f", at {self.bits_per_weight:.2f} bits for each packed weight."
        figures = None if self.quality is None else self.quality.figures
        if figures is None or self.quality is None:
            return text
        if figures.reference_loss is None:
            return f"{text} On {self.quality.text} it predicts with a loss of {figures.loss:.3f} nats a token."
        change = figures.loss - figures.reference_loss
        return (
            f"{text} On {self.quality.text} its loss is {abs(change):.3f} nats a token "
            f"{'higher' if change >= 0 else 'lower'} than the original's, and both rank the same token first "
            f"{figures.top1_agreement:.1%} of the time."
        )
