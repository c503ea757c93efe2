"""Finds the checkpoint names of packed tensors.

A packed directory names experts by their module in transformers' model. Checkpoints of most architectures store one
tensor per expert under other names. The path of the block is found from its router, which is never packed. For an
architecture without a description, the parameters of transformers' own module are written (`experts.gate_up_proj`), in
the layout of that module, which is read from the model that transformers builds from config.json.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moepack.checkpoint.architectures import ARCHITECTURES, STANDARD, Architecture, Layout
from moepack.checkpoint.beyond import LAYOUT
from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.experts import ExpertsForm, form_of
from moepack.errors import CorruptionError, UnsupportedModelError
from moepack.format.directory import PackedDirectory
from moepack.integrations.decoding import CHANNELS, RESIDUALS

__all__ = ["Experts", "experts_of"]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        module: path of the module in transformers' model.
        packed: packed tensor names by projection.
        block: path of the sparse block on disk.
        layout: layout of the experts below the block.
        form: form of transformers' module if its parameters are written; None if `layout` applies.
        shapes: shapes of that module's parameters.
    """

    module: str
    packed: Mapping[str, str]
    block: str
    layout: Layout
    form: ExpertsForm | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def files(self) -> Iterable[tuple[str, ...]]:
        """Return the groups of projections that share a tensor and are written together."""
        if self.form is not None:
            places = self.form.places
            return [tuple(p for p in places if places[p].parameter == name) for name in self.form.parameters]
        if self.layout.stacked:
            return self.layout.tensors.values()
        names = ("gate_proj", "up_proj", "down_proj") if {CHANNELS, RESIDUALS} & self.packed.keys() else self.packed
        return [(projection,) for projection in names]

    def name(self, projection: str, expert: int) -> str:
        """Return the name of the tensor that holds an expert's matrix."""
        if self.form is not None:
            return f"{self.module}.{self.form.places[projection].parameter}"
        return f"{self.block}.{self.layout.template(projection).format(expert)}"


def experts_of(source: PackedDirectory) -> list[Experts]:
    """Return the expert layers of a packed directory, in the order of its shards.

    Raises:
        CorruptionError: the directory has experts without their block.
    """
    manifest, modules, beyond = source.manifest, dict[str, dict[str, str]](), set[str]()
    for name, record in manifest.packed().items():
        if record.experts:
            modules.setdefault(record.module, {})[record.projection] = name
        if record.beyond:
            beyond.add(record.module)
    architecture = ARCHITECTURES.get(manifest.architecture)
    model = None if architecture is not None or not modules else meta_model(source.path, source.config)
    dense = [name for name, record in manifest.tensors.items() if not record.experts]
    found = []
    for module, packed in modules.items():
        if module in beyond:
            found.append(Experts(module, packed, module.removesuffix(".experts"), LAYOUT))
        elif model is not None or architecture is None:
            found.append(_as_in_the_model(module, packed, model))
        else:
            found.append(Experts(module, packed, _block(module, architecture, dense), architecture.layouts[0]))
    return found


def _as_in_the_model(module: str, packed: Mapping[str, str], model: Any) -> Experts:
    """Return the experts of a transformers module, written as its parameters."""
    original = model.get_submodule(module)
    form = form_of(original)
    if form is None:
        raise UnsupportedModelError("has a different form in the installed transformers", tensor=module)
    shapes = {name: tuple(original.get_parameter(name).shape) for name in form.parameters}
    return Experts(module, packed, module.rpartition(".")[0], STANDARD.layouts[0], form, shapes)


def _block(module: str, architecture: Architecture, names: Iterable[str]) -> str:
    """Return the path of a sparse block on disk, from the name of its router."""
    parent = module.removesuffix(f".{architecture.module}.experts")
    pattern = re.compile(rf"(?P<block>{architecture.layer}\.{architecture.block})\.(?P<rest>.+)")
    for name in names:
        match = pattern.fullmatch(name)
        if match and match["block"].rpartition(".")[0] == parent and match["rest"].startswith(architecture.router):
            return match["block"]
    raise CorruptionError("has packed experts but no router", tensor=module)
