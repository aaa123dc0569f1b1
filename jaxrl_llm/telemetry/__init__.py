"""What a run writes down and what it shows: rows, curves, progress, what is wrong, and the summary at its end."""

from jaxrl_llm.lazy import attach

__getattr__ = attach(__name__, {"Finding": "diagnosis", "diagnose": "diagnosis"})
