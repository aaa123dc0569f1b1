"""Runs, one per file: the docstring gives the command, the hardware, and the expected result."""
