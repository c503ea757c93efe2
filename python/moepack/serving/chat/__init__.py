"""Reads what chat models write: reasoning, content and calls of functions, in the formats of several families."""
