"""What the hub calls the tensors that were packed.

A packed directory knows experts by their module in transformers' model. On disk most architectures keep a tensor for
each expert, under names of their own; the block's path is found from its router, which was never packed. For an
architecture without a description, the names of transformers' own module are used (`experts.gate_up_proj`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moepack.checkpoint.architectures import ARCHITECTURES, STANDARD, Architecture, Layout
from moepack.errors import CorruptionError
from moepack.format import Manifest

__all__ = ["Experts", "experts_of"]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        module: path of the module in transformers' model.
        packed: name of the packed tensor by projection.
        block: path of the sparse block on disk.
        layout: how the experts are stored below the block.
    """

    module: str
    packed: Mapping[str, str]
    block: str
    layout: Layout

    def files(self) -> Iterable[tuple[str, ...]]:
        """The projections that are to be written together: those that share a tensor."""
        return self.layout.tensors.values() if self.layout.stacked else [(projection,) for projection in self.packed]

    def name(self, projection: str, expert: int) -> str:
        """The tensor that holds a matrix of an expert."""
        return f"{self.block}.{self.layout.template(projection).format(expert)}"


def experts_of(manifest: Manifest) -> list[Experts]:
    """Find the layers of experts of a packed directory, in the order of its shards.

    Raises:
        CorruptionError: the directory has experts whose block it does not have.
    """
    modules: dict[str, dict[str, str]] = {}
    for name, record in manifest.packed().items():
        if record.experts:
            modules.setdefault(record.module, {})[record.projection] = name
    architecture = ARCHITECTURES.get(manifest.architecture)
    dense = [name for name, record in manifest.tensors.items() if not record.experts]
    found = []
    for module, packed in modules.items():
        block = module.removesuffix(".experts") if architecture is None else _block(module, architecture, dense)
        found.append(Experts(module, packed, block, (architecture or STANDARD).layouts[0]))
    return found


def _block(module: str, architecture: Architecture, names: Iterable[str]) -> str:
    """The path on disk of a sparse block, from the name of its router."""
    parent = module.removesuffix(f".{architecture.module}.experts")
    pattern = re.compile(rf"(?P<block>{architecture.layer}\.{architecture.block})\.(?P<rest>.+)")
    for name in names:
        match = pattern.fullmatch(name)
        if match and match["block"].rpartition(".")[0] == parent and match["rest"].startswith(architecture.router):
            return match["block"]
    raise CorruptionError("has packed experts and no router", tensor=module)
