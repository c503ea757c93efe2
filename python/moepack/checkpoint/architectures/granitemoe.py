"""Granite 3 MoE. Embeddings and residuals are scaled."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import ATTENTION, FUSED, GRANITE

register(
    Architecture(
        "granitemoe",
        layouts=(GRANITE, FUSED),
        dense={"attention": ATTENTION},
        block="block_sparse_moe",
        module="block_sparse_moe",
        router=("router.",),
    )
)
