"""Allocates the bytes of a model: methods propose candidates, and one solver chooses.

This room knows no method, checkpoint or format: tensors are represented by bytes and expected losses.
"""

from moepack.allocation.budget import Choice, allocate
from moepack.allocation.candidates import Candidate, Chain
from moepack.allocation.price import Curves, PricedBudget

__all__ = ["Candidate", "Chain", "Choice", "Curves", "PricedBudget", "allocate"]
