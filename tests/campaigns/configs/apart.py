"""Branches of episodes for two processes, whose environments are divided among them."""

from branches import config as config
