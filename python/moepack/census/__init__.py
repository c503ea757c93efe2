"""Which architectures of the installed transformers moepack packs and runs: tried out on tiny random models."""

from moepack.census.check import Outcome, architectures, check, core_decodes

__all__ = ["Outcome", "architectures", "check", "core_decodes"]
