"""A model family with nothing new in its layers: Seed-OSS, which has Qwen2's tensors.

An entry says how config.json and the names of the tensors map to ours, and back; loading, saving and training follow.
"""

from jaxrl_llm.models.families import BIASES, EMBEDDINGS, MATRICES, PRE_NORMS, Family, _defaults

# jaxrl_llm/models/families.py, in _ALL, after LLAMA
_ALL = (
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        "SeedOssForSequenceClassification",
        _defaults(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True),
        constants={},
        tensors=EMBEDDINGS + MATRICES + BIASES + PRE_NORMS,
    ),
)
