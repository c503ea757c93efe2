"""The description of an architecture, used by compression, rotation and export.

A description is data without algorithms. It gives the names in a checkpoint and their relation to the residual stream.
Names are regular expressions relative to the place that the attribute documents, so that a description covers the
spellings of several exporters; `{}` stands for an expert's number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["ARCHITECTURES", "EMBEDDING", "ROLES", "Architecture", "Layout", "Linears", "register"]

ROLES = ("attention", "shared", "mlp", "head")
"""The roles of linear layers outside the experts, in the order of computation."""


EMBEDDING = "embedding"
"""The role of the token embedding, which is not a linear layer: its rows are looked up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The storage layout of a sparse block's experts.

    Attributes:
        tensors: maps each tensor's name below the block to its projections, in the order of computation. A name with
            `{}` is one projection of one expert; a name without it stacks all experts, with their projections
            concatenated along the rows.
    """

    tensors: Mapping[str, tuple[str, ...]]

    @property
    def first(self) -> str:
        """The name of a tensor that every block of this layout has."""
        return next(iter(self.tensors)).format(0)

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts."""
        return "{}" not in next(iter(self.tensors))

    def template(self, projection: str) -> str:
        """Return the name of the tensor that holds a projection, with `{}` for the expert's number."""
        return next(name for name, projections in self.tensors.items() if projection in projections)


@dataclass(frozen=True, slots=True)
class Linears:
    """The linear layers of one role outside the experts, by their relation to the residual stream.

    Attributes:
        path: path of their module below the layer.
        reads: layers that read the stream after `norm`.
        writes: layers whose outputs are added to the stream.
        inner: layers in between.
        norm: path of the norm before them, below the layer. Rotations and the balanced form need it.
        others: other tensors below `path` that do not access the stream: biases of reading layers, norms of heads.
        latent: layers in `inner` by the norm before them, below `path`; only that layer reads the norm.
        values: the layer whose outputs attention averages over tokens, and the one that reads the averages; empty if
            something else happens in between.
        channels: the layer whose outputs are multiplied by gates or pass through a ReLU, and the one that reads them;
            empty if there is no such pair.
    """

    path: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inner: tuple[str, ...] = ()
    norm: str = ""
    others: tuple[str, ...] = ()
    latent: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """The description of one architecture.

    Attributes:
        model_type: transformers' model type.
        layouts: possible layouts of the experts. `moepack export` writes the first.
        dense: the linear layers outside the experts, by role (one of `ROLES`). The head is given by `head`.
        block: path of the sparse block on disk, below the layer.
        module: last component of the block's path in transformers' model.
        norm: path of the norm before the block, below the layer. Rotations and the balanced form need it.
        router: prefixes of the router's names below the block.
        shared: prefixes of the names of the shared experts and their gate below the block.
        packed: name of the packed tensor below the experts module, with `{}` for the projection. Stock transformers has
            that name with another shape, so that loading without moepack fails.
        stacks: maps the paths of the model's layer stacks to the config.json keys of their lengths. Tensors after the
            last layer (multi-token prediction) are not packed.
        expert_keys: config.json keys for the number of experts. Those present must agree.
        top_k_keys: config.json keys for the number of experts per token. The first one present is used.
        embeddings, last_norm, head: the tensors at both ends of the residual stream. A head that is tied to the
            embeddings (`tie_word_embeddings`) has no tensor of its own.
        looks_up: whether the embedding is a plain row look-up (`nn.Embedding`), so that it can be packed.
        rotatable: whether the stream passes only through RMS norms and the layers named here.
        place: regular expression of the path below which a norm and its readers lie, with the group `place`; None means
            the layer.
        readers: names of the matrices that read each norm, by the norm's path, both below `place`. None derives them
            from the other attributes.
        readers_across: names of the matrices that read a norm of another place, by the norm's path; full names.
    """

    model_type: str
    layouts: tuple[Layout, ...]
    dense: Mapping[str, Linears]
    block: str = "mlp"
    module: str = "mlp"
    norm: str = "post_attention_layernorm"
    router: tuple[str, ...] = ("gate.",)
    shared: tuple[str, ...] = ()
    packed: str = "{}"
    stacks: Mapping[str, str] = field(default_factory=lambda: {"model.layers": "num_hidden_layers"})
    expert_keys: tuple[str, ...] = ("num_local_experts", "num_experts", "n_routed_experts")
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    embeddings: str = "model.embed_tokens.weight"
    last_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    looks_up: bool = True
    rotatable: bool = False
    place: str | None = None
    readers: Mapping[str, tuple[str, ...]] | None = None
    readers_across: Mapping[str, str] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        """Regular expression of a layer's path, with the groups `layer` (the path) and `number`."""
        return rf"(?P<layer>(?:{'|'.join(map(_escaped, self.stacks))})\.(?P<number>\d+))"

    @property
    def expert_names(self) -> tuple[str, ...]:
        """Prefixes of names below the block that only experts have."""
        return tuple({f"{name.partition('.')[0]}." for layout in self.layouts for name in layout.tensors})

    @property
    def norms(self) -> frozenset[str]:
        """Paths of the norms before layers that read the residual stream, below the layer."""
        return frozenset({self.norm, *(linears.norm for linears in self.dense.values())} - {""})

    def top_k(self, config: Mapping[str, Any]) -> int:
        """Return the number of experts per token, or 1 if config.json has none."""
        return next((config[key] for key in self.top_k_keys if isinstance(config.get(key), int)), 1)


def _escaped(path: str) -> str:
    return path.replace(".", r"\.")


_known: dict[str, Architecture] = {}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_known)
"""The described architectures, by model type."""


def register(architecture: Architecture) -> None:
    """Register an architecture. Each file of this package calls it once.

    Raises:
        ValueError: another architecture has the same model type.
    """
    if _known.setdefault(architecture.model_type, architecture) is not architecture:
        raise ValueError(f"the architecture '{architecture.model_type}' is already registered")
