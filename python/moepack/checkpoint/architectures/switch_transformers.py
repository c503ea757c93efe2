"""Switch Transformers (arXiv 2101.03961): encoder and decoder, every second block sparse, one expert per token."""

from moepack.checkpoint.architectures.architecture import Architecture, Layout, Linears, register

register(
    Architecture(
        "switch_transformers",
        layouts=(Layout({"experts.expert_{}.wi.weight": ("wi",), "experts.expert_{}.wo.weight": ("wo",)}),),
        dense={
            "attention": Linears(
                r"layer\.\d+\.(?:SelfAttention|EncDecAttention)",
                reads=("q", "k", "v"),
                writes=("o",),
                values=("v", "o"),
            ),
            "mlp": Linears(r"layer\.\d+\.(?:mlp|DenseReluDense)", reads=("wi",), writes=("wo",), channels=("wi", "wo")),
        },
        block=r"layer\.\d+\.mlp",
        router=("router.",),
        packed="expert_0.{}.weight",
        stacks={"encoder.block": "num_layers", "decoder.block": "num_decoder_layers"},
        top_k_keys=(),
        embeddings="shared.weight",
        looks_up=False,
        last_norm="decoder.final_layer_norm.weight",
        place=r"(?P<place>(?:en|de)coder\.block\.\d+\.layer\.\d+)",
        readers={
            "layer_norm": (
                r"SelfAttention\.[qkv]\.weight",
                r"EncDecAttention\.q\.weight",
                r"(?:mlp|DenseReluDense)\.wi\.weight",
                r"mlp\.router\.classifier\.weight",
                r"mlp\.experts\.expert_\d+\.wi\.weight",
            )
        },
        readers_across={"encoder.final_layer_norm": r"decoder\..+\.EncDecAttention\.[kv]\.weight"},
    )
)
