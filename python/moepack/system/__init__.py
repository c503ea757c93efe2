"""Everything that differs between Linux, macOS and Windows, one module per concern.

No other module names a function, flag or file that only some systems have (`tests/system/test_portable.py`). Each
module selects its implementation when it is imported, so all of them import on every system. A facility that a system
lacks is emulated or does nothing; functions that answer a question return None if the system cannot tell.

This is the lowest layer: it imports nothing of the package.
"""
