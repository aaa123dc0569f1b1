"""Language models: load, save, run. Heavy libraries are imported on first use.

``load_pretrained`` and ``save_pretrained`` speak Hugging Face's directories; ``logits`` is the forward pass.
"""

from typing import Any

__all__ = ["load_pretrained", "logits", "save_pretrained"]

_HOMES = {
    "load_pretrained": "jaxrl_llm.models.pretrained",
    "save_pretrained": "jaxrl_llm.models.hf",
    "logits": "jaxrl_llm.models.decoder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
