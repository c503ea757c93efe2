"""Stores of packed bytes: mapped files, private memory, GPUs, parts of a file, or slots on a device."""
