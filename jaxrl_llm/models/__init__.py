"""Language models: load, save, run. ``load_pretrained``, ``load_scalar`` (reward models) and ``save_pretrained`` speak
Hugging Face's directories; ``logits`` and ``scores`` are the forward pass. Heavy libraries are imported on first
use.
"""

from jaxrl_llm.system import attach

HOMES = {
    "load_pretrained": "pretrained",
    "load_scalar": "pretrained",
    "logits": "decoder",
    "save_gguf": "gguf",
    "save_pretrained": "hf",
    "scores": "heads",
}

__all__ = [*HOMES]

__getattr__ = attach(__name__, HOMES)
