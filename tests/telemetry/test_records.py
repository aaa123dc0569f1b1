"""The texts of a completion's tokens."""

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models

from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.telemetry.records import token_texts


@pytest.mark.parametrize("text", ["plain", "日本語 ä", "a\nb  c"])
def test_pieces_together_are_the_text(text):
    tokenizer = tiny_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = token_texts(tokens, tokenizer)
    assert "".join(found) == text and len(found) == len(tokens)
    assert token_texts([tokenizer.eos_token_id], tokenizer) == [tokenizer.eos_token]


def test_bytes_that_make_no_letters_end_nothing():
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁a": 257, "b": 258}
    bare = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    bare.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")
    assert token_texts([257, 258], tokenizer) == ["a", "b"]
    torn = [62, 171, 257, 217]
    assert token_texts(torn, tokenizer) == [tokenizer.decode([token]) for token in torn]
    assert token_texts(torn, tokenizer)[::2] == ["=", "a"]
