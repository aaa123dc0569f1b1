"""Data of the supervised stages: rows to learn from, as values, and their encoding as token ids."""

from jaxrl_llm.data.datasets import Collected, Pairs, Steps, Texts, Unpaired
from jaxrl_llm.data.loading import check_collected, load_texts
from jaxrl_llm.data.token_rows import Judged, Ranked, Stepped, Text, longest
