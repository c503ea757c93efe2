"""Tests which architectures of the installed transformers moepack can pack and run, on tiny random models."""

from moepack.census.trial import Outcome, architectures, check, core_decodes

__all__ = ["Outcome", "architectures", "check", "core_decodes"]
