"""Untrusted Python programs in processes that can reach nothing; ``rewards.sandbox`` is the door to it.

``client`` starts a fork server for each program that runs at one time, ``server`` is its program, ``kernel`` and
``syscalls`` are the restrictions that it puts on its children, and ``program`` is what a child does.
"""
