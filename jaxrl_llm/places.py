"""Where things lie that outlive a run."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where fetched models and compiled programs lie: ``JAXRL_LLM_CACHE``, else the user's cache directory."""
    if given := os.environ.get("JAXRL_LLM_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrl_llm"
