"""What moepack knows about an architecture: one value that compression, rotation and export read.

A description is data. It says how a checkpoint names things and what they do with the residual stream; whoever reads it
brings the algorithm. Names are regular expressions below the place that the attribute tells, so that a description can
take the spellings of several exporters; `{}` stands for an expert's number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["ARCHITECTURES", "EMBEDDING", "ROLES", "Architecture", "Layout", "Linears", "register"]

ROLES = ("attention", "shared", "mlp", "head")
"""What a linear layer outside the experts may be, in the order of the computation."""


EMBEDDING = "embedding"
"""The role of the embedding of tokens, which is no linear layer: its rows are looked up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the experts of a sparse block are stored.

    Attributes:
        tensors: the projections in each tensor, by the tensor's name below the block and in the order of the
            computation. A name with `{}` is one projection of one expert; one without stacks all experts, each with
            its projections one above the other.
    """

    tensors: Mapping[str, tuple[str, ...]]

    @property
    def first(self) -> str:
        """A name that every block of this layout has."""
        return next(iter(self.tensors)).format(0)

    @property
    def stacked(self) -> bool:
        """Whether a tensor holds all experts."""
        return "{}" not in next(iter(self.tensors))

    def template(self, projection: str) -> str:
        """The name of the tensor that holds a projection, `{}` for the expert's number."""
        return next(name for name, projections in self.tensors.items() if projection in projections)


@dataclass(frozen=True, slots=True)
class Linears:
    """Linear layers outside the experts that have one role, by what they do with the residual stream.

    Attributes:
        path: the module that holds them, below the layer.
        reads: those that read the stream, behind `norm`.
        writes: those whose outputs are added to the stream.
        inner: those in between.
        norm: the norm in front of them, below the layer; only rotations need it.
        others: tensors below `path` that are no such weights and do not see the stream: biases of what reads it, norms
            of heads.
    """

    path: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inner: tuple[str, ...] = ()
    norm: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: transformers' name of it.
        layouts: how its experts may be stored; `moepack export` writes the first.
        dense: the linear layers outside the experts by their role, one of `ROLES`; the head is `head`.
        block: the sparse block on disk, below the layer.
        module: last component of the block's path in transformers' model.
        norm: the norm in front of the block, below the layer; only rotations need it.
        router: beginnings of the router's names below the block.
        shared: beginnings of the names of the shared experts and of their gate below the block.
        packed: the packed tensor's name below the experts module, `{}` for the projection. Stock transformers knows
            that name with another shape, so that loading without moepack fails instead of guessing.
        stacks: the paths of the model's stacks of layers, and config.json's key for how many they have. What lies
            behind the last layer (multi-token prediction) is kept as it is.
        expert_keys: config.json's keys for the number of experts; those that it has must agree.
        top_k_keys: config.json's keys for the number of experts that a token visits; the first that it has counts.
        embeddings, last_norm, head: the tensors at both ends of the residual stream. A head that is tied to the
            embeddings (`tie_word_embeddings`) is no tensor of its own.
        looks_up: whether the embedding is a plain look-up of rows (`nn.Embedding`), so that it may be packed.
        rotatable: whether the stream passes only through RMS norms and the layers named here.
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

    @property
    def layer(self) -> str:
        """Pattern of a layer's path, whose groups are `layer` (the path) and `number`."""
        return rf"(?P<layer>(?:{'|'.join(map(_escaped, self.stacks))})\.(?P<number>\d+))"

    @property
    def expert_names(self) -> tuple[str, ...]:
        """Beginnings of names below the block that only experts have."""
        return tuple({f"{name.partition('.')[0]}." for layout in self.layouts for name in layout.tensors})

    @property
    def norms(self) -> frozenset[str]:
        """The norms in front of layers that read the residual stream, below the layer."""
        return frozenset({self.norm, *(linears.norm for linears in self.dense.values())} - {""})

    def top_k(self, config: Mapping[str, Any]) -> int:
        """How many experts a token visits, 1 where config.json does not say."""
        return next((config[key] for key in self.top_k_keys if isinstance(config.get(key), int)), 1)


def _escaped(path: str) -> str:
    return path.replace(".", r"\.")


_known: dict[str, Architecture] = {}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_known)
"""The described architectures, by transformers' model type."""


def register(architecture: Architecture) -> None:
    """Let moepack know an architecture; each file of this package calls it once.

    Raises:
        ValueError: another one has its model type.
    """
    if _known.setdefault(architecture.model_type, architecture) is not architecture:
        raise ValueError(f"the architecture '{architecture.model_type}' is already registered")
