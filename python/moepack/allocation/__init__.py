"""How the bytes of a model are shared out: methods propose candidates, one solver chooses.

Nothing here knows a method, a checkpoint or a format: tensors come as bytes and expected losses.
"""

from moepack.allocation.budget import Choice, allocate
from moepack.allocation.candidates import Candidate, Chain
from moepack.allocation.price import PricedBudget

__all__ = ["Candidate", "Chain", "Choice", "PricedBudget", "allocate"]
