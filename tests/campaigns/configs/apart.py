"""Branches of episodes for two processes, whose environments are divided among them; too long for every change."""

import dataclasses

from branches import config as branches

config = dataclasses.replace(branches, steps=4)
