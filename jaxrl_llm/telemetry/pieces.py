"""The text of single tokens."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token, special ones included; together they are the text of all.

    Of a letter that takes several tokens the last one has it, and the others have nothing. Some tokenizers cannot tell
    the pieces of bytes that make no letters: then each token is what it is alone.

    Args:
      tokens: ids.
      tokenizer: a fast one of transformers.
    """
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens]
    except Exception:  # it has no kind of its own
        return [tokenizer.decode([token]) for token in tokens]
