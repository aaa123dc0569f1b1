"""Four random layers, three of them with a gated delta net in place of attention, learn to write a digit.

    jaxrl-llm train hybrid_smoke

No download. The task is that of ``smoke``, and the layers are those of Qwen3.5; see docs/models.md.
"""

import dataclasses

from configs.smoke import config as smoke

config = dataclasses.replace(smoke, model="tiny-random-hybrid", steps=12)
