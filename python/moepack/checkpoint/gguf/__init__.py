"""Reads GGUF models of llama.cpp as checkpoints.

`header` reads one file, `model` all parts of a split one. `names` maps tensors to transformers' names and layouts,
`config` metadata to transformers' configuration.
"""

from moepack.checkpoint.gguf.checkpoint import open_gguf
from moepack.checkpoint.gguf.files import gguf_files

__all__ = ["gguf_files", "open_gguf"]
