"""Writes bitsandbytes.safetensors: one matrix in each form that bitsandbytes stores, and the library's own decoding.

Run it with bitsandbytes (0.50 wrote the file) on a CPU. For each form NAME, `NAME.*` are the tensors that transformers
saves, and `expected.NAME` is what the library decodes.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_name("bitsandbytes.safetensors")


def matrix() -> torch.Tensor:
    """48 x 40 values with rows of different sizes; bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(48, 40, generator=generator) * torch.linspace(0.01, 2, 48)[:, None]).bfloat16()


def stored() -> dict[str, torch.Tensor]:
    """The tensors of all forms, as the installed bitsandbytes makes them."""
    from bitsandbytes import functional

    tensors: dict[str, torch.Tensor] = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            name = f"{kind}{'_nested' * nested}"
            codes, state = functional.quantize_4bit(matrix(), blocksize=64, compress_statistics=nested, quant_type=kind)
            tensors[f"{name}.weight"] = codes
            tensors |= {f"{name}.weight.{end}": part for end, part in state.as_dict(packed=True).items()}
            tensors[f"expected.{name}"] = functional.dequantize_4bit(codes, state)
    codes, scales, _ = functional.int8_vectorwise_quant(matrix().half())
    tensors |= {"int8.weight": codes, "int8.SCB": scales, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    tensors["expected.int8"] = functional.int8_vectorwise_dequant(codes, scales)
    return tensors


if __name__ == "__main__":
    save_file(stored(), FILE)
