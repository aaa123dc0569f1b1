"""From chats to the token ids that are learned."""

from collections.abc import Sequence
from typing import Any


class Writer:
    """Writes prompts and what follows them as token ids.

    Args:
      wording: how prompts are templated.
      tokenizer: of the model.
      stop_ids: tokens at which the model's completions end.
    """

    def __init__(self, wording: Any, tokenizer: Any, stop_ids: Sequence[int]):
        self._wording = wording
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
