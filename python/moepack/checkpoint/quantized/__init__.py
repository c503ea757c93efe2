"""Decodes quantized source checkpoints into floating-point weights.

A quantized weight consists of several tensors: codes, scales, maybe zero points. Here they appear as one tensor under
its unquantized name, decoded when it is read, one tensor or one expert of a stacked tensor at a time. Values are
rounded to bfloat16 (float16 if the scales are float16), as in transformers' dequantization. Unquantized tensors are
passed through unchanged.

| `quant_method` | tensors of a weight | module |
|---|---|---|
| `fp8`, `fbgemm_fp8`, `modelopt` and `quark` in fp8 | `weight` (float8_e4m3fn), `weight_scale_inv` or `weight_scale`: a
scale per block, row, expert or tensor; also for stacked experts (`gate_up_proj`, `gate_up_proj_scale`) | `float8` |
| `mxfp4` | `_blocks`, `_scales`: groups of 32 values of 4 bits, exponents of two | `float4` |
| `modelopt` in NVFP4 | `weight` (uint8), `weight_scale` (float8_e4m3fn), `weight_scale_2`: a scale per 16 values and
one per tensor | `float4` |
| `compressed-tensors`, by format: `pack-quantized` | `weight_packed`, `weight_scale`, maybe `weight_zero_point`,
`weight_g_idx` (4 or 8 bits) | `integers` |
| `int-quantized` | `weight` (int8), `weight_scale`, maybe `weight_zero_point` | `integers` |
| `float-quantized` | `weight` (float8_e4m3fn), `weight_scale`: a scale per row, block or tensor | `float8` |
| `nvfp4-pack-quantized`, `mxfp4-pack-quantized` | `weight_packed` (uint8), `weight_scale`, `weight_global_scale` |
`float4` |
| `gptq`, `awq` | `qweight`, `qzeros`, `scales`, and `g_idx` of gptq (2, 4, 8 bits; awq 4) | `integers` |
| `bitsandbytes` | `weight` (uint8), `.absmax`, `.quant_map`, `.quant_state`, and scales of scales; or `weight` (int8),
`SCB` | `bitsandbytes` |
"""

from moepack.checkpoint.quantized.checkpoint import QuantizedCheckpoint
from moepack.checkpoint.quantized.opening import adapted, open_checkpoint

__all__ = ["QuantizedCheckpoint", "adapted", "open_checkpoint"]
