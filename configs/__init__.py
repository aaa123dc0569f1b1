"""Runs, one per file: the docstring says the command, the hardware, and what to expect."""
