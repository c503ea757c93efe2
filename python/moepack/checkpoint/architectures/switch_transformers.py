"""Switch Transformers (arXiv 2101.03961): encoder and decoder, every second block sparse, one expert per token."""

from moepack.checkpoint.architectures.architecture import Architecture, Layout, Linears, register

register(
    Architecture(
        "switch_transformers",
        layouts=(Layout({"experts.expert_{}.wi.weight": ("wi",), "experts.expert_{}.wo.weight": ("wo",)}),),
        dense={
            "attention": Linears(
                r"layer\.\d+\.(?:SelfAttention|EncDecAttention)", reads=("q", "k", "v"), writes=("o",)
            ),
            "mlp": Linears(r"layer\.\d+\.(?:mlp|DenseReluDense)", reads=("wi",), writes=("wo",)),
        },
        block=r"layer\.\d+\.mlp",
        router=("router.",),
        packed="expert_0.{}.weight",
        stacks={"encoder.block": "num_layers", "decoder.block": "num_decoder_layers"},
        top_k_keys=(),
        embeddings="shared.weight",
        looks_up=False,
        last_norm="decoder.final_layer_norm.weight",
    )
)
