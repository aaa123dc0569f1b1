"""Reinforcement learning: the stage, and the ingredients that a run may add to it, one file each."""
