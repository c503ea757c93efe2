"""What the hub calls the tensors that were packed.

A packed directory knows experts by their module in transformers' model. On disk most architectures keep a tensor for
each expert, under names of the family; the block's path is found from its router, which was never packed. For an
architecture outside the table, the names of transformers' own module are used (`experts.gate_up_proj`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moepack.checkpoint.architectures import FAMILIES, Family, PerExpert, Stacked
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
    layout: PerExpert | Stacked

    def files(self) -> Iterable[tuple[str, ...]]:
        """The projections that are to be written together: those that share a tensor."""
        if isinstance(self.layout, PerExpert):
            return [(projection,) for projection in self.packed]
        return [("gate_proj", "up_proj"), ("down_proj",)]

    def name(self, projection: str, expert: int) -> str:
        """The tensor that holds a matrix of an expert."""
        if isinstance(self.layout, PerExpert):
            return f"{self.block}.{self.layout.names[projection].format(expert)}"
        return f"{self.block}.{self.layout.down if projection == 'down_proj' else self.layout.gate_up}"


def experts_of(manifest: Manifest) -> list[Experts]:
    """Find the layers of experts of a packed directory, in the order of its shards.

    Raises:
        CorruptionError: the directory has experts whose block it does not have.
    """
    modules: dict[str, dict[str, str]] = {}
    for name, record in manifest.packed().items():
        if record.experts:
            modules.setdefault(record.module, {})[record.projection] = name
    family = FAMILIES.get(manifest.architecture)
    dense = [name for name, record in manifest.tensors.items() if not record.experts]
    found = []
    for module, packed in modules.items():
        if family is None:
            block = module.removesuffix(".experts")
            found.append(Experts(module, packed, block, Stacked("experts.gate_up_proj", "experts.down_proj")))
        else:
            found.append(Experts(module, packed, _block(module, family, dense), family.layouts[0]))
    return found


def _block(module: str, family: Family, names: Iterable[str]) -> str:
    """The path on disk of a sparse block, from the name of its router."""
    parent = module.removesuffix(f".{family.module}.experts")
    pattern = re.compile(rf"(?P<block>{family.block})\.(?P<rest>.+)")
    for name in names:
        match = pattern.fullmatch(name)
        if match and match["block"].rpartition(".")[0] == parent and match["rest"].startswith(family.router):
            return match["block"]
    raise CorruptionError("has packed experts and no router", tensor=module)
