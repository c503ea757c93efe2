"""Writes, opens and verifies packed directories. docs/format.md specifies every byte.

`shard` writes safetensors files, `manifest` is moepack.json, `hub` writes the files for transformers, `directory` opens
and maps, `verification` finds damage, `atomic` publishes files. Nothing here computes on weights.
"""

from moepack.format.directory import PackedDirectory
from moepack.format.manifest import MANIFEST, VERSION, FileRecord, Manifest, TensorRecord
from moepack.format.side import SideFile
from moepack.format.verification import Fault, VerifyReport, verify

__all__ = [
    "MANIFEST",
    "VERSION",
    "Fault",
    "FileRecord",
    "Manifest",
    "PackedDirectory",
    "SideFile",
    "TensorRecord",
    "VerifyReport",
    "verify",
]
