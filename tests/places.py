"""Folders of the checkout that tests read, independent of a test's own place."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden"
ROOT = TESTS.parent
BENCHES = ROOT / "benches"
TINY_MOE = ROOT / "examples" / "tiny-moe"
NOVEL = ROOT / "examples" / "texts" / "white-fang.txt"
SHARED = ROOT.parent / "shared"
"""Models and scripts next to the checkout; absent elsewhere."""
