"""Algorithms that turn weights into codes. None of them opens a file or knows a method."""
