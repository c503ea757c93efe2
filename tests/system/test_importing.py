"""Imports of a command run without the garbage collector, which then leaves the libraries alone."""

import gc
import sys
from types import ModuleType

import pytest

from fork_support import forked
from moepack.memory import MANY, importing


@pytest.mark.parametrize("count", [MANY, 1])
def test_many_new_modules_are_exempted(count: int) -> None:
    def work() -> None:
        with importing():
            assert not gc.isenabled()
            sys.modules.update({f"new{i}": ModuleType(f"new{i}") for i in range(count)})
        assert gc.isenabled() and bool(gc.get_freeze_count()) == (count == MANY)

    before = gc.get_freeze_count()
    assert before == 0 and forked(work) == 0
