"""Slices of packed tensors: some experts, a range of rows and a range of columns, as a packed tensor of its own.

A slice copies bytes and decodes none, so it reads only its own part of a mapped file. Ranks of a parallel engine hold
slices (`moepack.vllm`). A format can be cut only at certain rows and columns, which `enclosing` returns:

| format | rows | columns |
|---|---|---|
| groupwise | multiples of 16 | whole records: one or two groups, at least 32 columns |
| codebook | multiples of 16 | blocks; steps of 32, 64 or 128 columns if a row has one block |
| compensated | multiples of 64 | whole records, in multiples of 64 |
| coded | streams of 16 or 64 | none |
| ternary | multiples of 64 (`fsv8`), all (`dict16`) | none |

Other formats are not cut. Experts are chosen freely in all formats of the table.

Invariant: the values of a slice are the tensor's values at its experts, rows and columns, bit by bit.
"""

from moepack.slices.base import Grain, Selection
from moepack.slices.tensors import cut, enclosing, grain_of

__all__ = ["Grain", "Selection", "cut", "enclosing", "grain_of"]
