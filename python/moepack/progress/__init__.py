"""Showing how far a long job is. The pipeline reports to a `Progress`; who draws it is the caller's choice.

`terminal_progress` gives a bar that redraws itself on a terminal and plain lines elsewhere (a log file, CI).
"""

from moepack.progress.base import Progress, Silent
from moepack.progress.display import Bar, Lines, terminal_progress

__all__ = ["Bar", "Lines", "Progress", "Silent", "terminal_progress"]
