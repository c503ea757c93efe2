"""Reads GGUF models of llama.cpp as checkpoints.

`header` reads one file, `model` all parts of a split one. `names` maps tensors to transformers' names and layouts,
`config` metadata to transformers' configuration. `companion` gives a file the form of a model directory.
"""

from moepack.checkpoint.gguf.checkpoint import open_gguf
from moepack.checkpoint.gguf.companion import companion, is_gguf
from moepack.checkpoint.gguf.files import gguf_files

__all__ = ["companion", "gguf_files", "is_gguf", "open_gguf"]
