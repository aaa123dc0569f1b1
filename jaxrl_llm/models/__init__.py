"""Language models: load, save, run. Heavy libraries are imported on first use.

``load_pretrained`` and ``save_pretrained`` speak Hugging Face's directories; ``logits`` is the forward pass.
"""

from jaxrl_llm import lazy

__all__ = ["load_pretrained", "logits", "save_pretrained"]

__getattr__ = lazy.attach(__name__, {"load_pretrained": "pretrained", "save_pretrained": "hf", "logits": "decoder"})
