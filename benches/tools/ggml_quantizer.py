"""Applies llama.cpp's own quantizer to a Llama checkpoint, using the library in `llama-cpp-python`.

The checkpoint is written as a GGUF file in float32. `llama_model_quantize` creates a file of the requested type, in
which it chooses a type for each tensor, and `gguf` decodes it. llama.cpp's runtime is not used.

K and I types have blocks of 256 columns. A row whose length is not a multiple of that falls back to a larger type, so a
model with 576 columns quantized to Q2_K has five bits per weight. `folded` writes four such rows as one of 2,304, whose
blocks then cross rows; the importances are repeated likewise. This measures the types as if their blocks fitted.
"""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benches.tools.quantized import Quantized, linear_layers, opened

BLOCK = 256
"""Columns of a block of K and I types."""
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_FLOATS = ctypes.POINTER(ctypes.c_float)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of a Llama checkpoint."""
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


class Turned:
    """Rows of queries and keys: transformers rotates halves of a head, llama.cpp neighbours."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def to_gguf(self, name: str, weight: Tensor) -> Tensor:
        """Rows in llama.cpp's order."""
        return self._swapped(name, weight, 2, -1)

    def from_gguf(self, name: str, weight: Tensor) -> Tensor:
        """Rows in transformers' order."""
        return self._swapped(name, weight, -1, 2)

    def _swapped(self, name: str, weight: Tensor, outer: int, inner: int) -> Tensor:
        heads = self.heads.get(name.split(".")[-2])
        if heads is None:
            return weight
        rows, columns = weight.shape
        outer, inner = (rows // heads // 2 if each < 0 else each for each in (outer, inner))
        return weight.reshape(heads, outer, inner, columns).swapaxes(1, 2).reshape(rows, columns)


def fold(columns: int) -> int:
    """The number of rows that form one whose length is a multiple of a block."""
    return BLOCK // math.gcd(BLOCK, columns)


def _folded(tensor: Tensor, times: int) -> Tensor:
    """A matrix with rows joined in groups; a vector is unchanged."""
    return tensor.reshape(-1, times * tensor.shape[-1]) if tensor.ndim == 2 else tensor


def importances(model: Path, ids: Tensor, device: str) -> dict[str, Tensor]:
    """What llama.cpp's imatrix holds: the mean square of each input of each projection, over all tokens.

    They are kept beside the model, since every type needs the same.
    """
    kept = model.with_name(f"{model.name}-importances-{len(ids)}.safetensors")
    if kept.exists():
        return load_file(kept)
    loaded, sums = opened(model, torch.float32, device), {}

    def note(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].double().square().flatten(0, -2).sum(0)

        return hook

    for name, layer in linear_layers(loaded):
        layer.register_forward_pre_hook(note(f"{name}.weight"))
    with torch.inference_mode():
        for row in ids.to(device):
            loaded.model(row[None], use_cache=False)
    found = {name: (each / ids.numel()).float().cpu() for name, each in sums.items()}
    save_file(found, kept)
    return found


def write_gguf(tensors: dict[str, Tensor], config: dict[str, Any], file: Path) -> None:
    """Write a GGUF file for the quantizer, without tokens."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, kind: str, weights_of: dict[str, Tensor]) -> None:
    """Run `llama_model_quantize`.

    Args:
        source: a GGUF file in float32.
        out: the file to make.
        kind: a type of file, such as "Q3_K_M".
        weights_of: importances by tensor; none are used where it is empty.

    Raises:
        RuntimeError: the library refused; it prints why.
    """
    import llama_cpp as library

    library.llama_backend_init()
    settings = library.llama_model_quantize_default_params()
    settings.nthread = torch.get_num_threads()
    settings.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if weights_of:
        entries = (library.llama_cpp.llama_model_imatrix_data * (len(weights_of) + 1))()
        values = [np.ascontiguousarray(each.numpy(), np.float32) for each in weights_of.values()]
        for entry, name, each in zip(entries, weights_of, values, strict=False):
            entry.name, entry.data, entry.size = name.encode(), each.ctypes.data_as(_FLOATS), each.size
        settings.imatrix = entries
    if library.llama_model_quantize(str(source).encode(), str(out).encode(), settings):
        raise RuntimeError(f"llama_model_quantize refused {kind}")


def llama_cpp(
    model: Path, ids: Tensor, device: str, kind: str, imatrix: bool = False, folded: bool = True
) -> Quantized:
    """llama.cpp's types, with the embedding, which is also the head; norms stay in float32."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    turned, tensors = Turned(config), load_file(model / "model.safetensors")
    shapes = {gguf_name(name): (name, tensor.shape) for name, tensor in tensors.items()}
    times = {name: fold(tensor.shape[-1]) if folded and tensor.ndim == 2 else 1 for name, tensor in tensors.items()}
    weights_of = {}
    if imatrix:
        found = importances(model, ids, device)
        weights_of = {gguf_name(name): each.repeat(times[name]) for name, each in found.items()}
    result = Quantized()
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source.gguf", Path(folder) / "out.gguf"
        ordered = {name: turned.to_gguf(name, tensor.float()) for name, tensor in tensors.items()}
        write_gguf({gguf_name(name): _folded(each, times[name]) for name, each in ordered.items()}, config, source)
        quantize(source, out, kind, weights_of)
        for part in gguf.GGUFReader(out).tensors:
            name, shape = shapes[part.name]
            values = torch.from_numpy(gguf.quants.dequantize(part.data, part.tensor_type).astype(np.float32))
            result.put(name, turned.from_gguf(name, values.reshape(shape)), 8 * part.n_bytes)
    return result
