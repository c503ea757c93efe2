"""Writes modelopt.safetensors: one matrix in NVFP4 as NVIDIA ModelOpt stores it, and the library's own decoding.

Run it with nvidia-modelopt (0.47 wrote the file) on a CPU. `x.*` are the tensors that its export writes, and `expected`
is what the library decodes.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_name("modelopt.safetensors")


def stored() -> dict[str, torch.Tensor]:
    """The tensors, as the installed ModelOpt makes them."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    generator = torch.Generator().manual_seed(0)
    matrix = (torch.randn(24, 64, generator=generator) * torch.linspace(0.01, 2, 24)[:, None]).bfloat16()
    codes, scales, whole = NVFP4QTensor.quantize(matrix, 16)
    decoded = codes.dequantize(dtype=torch.bfloat16, scale=scales, double_scale=whole, block_sizes={-1: 16})
    return {
        "x.weight": codes._quantized_data,
        "x.weight_scale": scales,
        "x.weight_scale_2": whole,
        "x.input_scale": torch.tensor(1.0),
        "expected": decoded,
        "matrix": matrix,
    }


if __name__ == "__main__":
    save_file({name: tensor.contiguous() for name, tensor in stored().items()}, FILE)
