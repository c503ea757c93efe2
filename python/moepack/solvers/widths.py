"""Widths of group-wise integers. This module imports nothing, so that a command line can list them fast."""

__all__ = ["BITS", "GROUP_SIZES"]

BITS = (2, 3, 4, 8)
"""Bits per code."""

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Columns that may share a scale."""
