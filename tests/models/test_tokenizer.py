"""What a tokenizer must be to be trusted, the text that tokens spell, and what another release reads again."""

import copy
import json

import jax
import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, save_pretrained
from jaxrl_llm.models.config import Attention, ModelConfig, TokenIds
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.pretrained import CHATML
from jaxrl_llm.models.tokenizer import PROBE, byte_alphabet, load_tokenizer, save_tokenizer, text_of
from jaxrl_llm.rollout.generation import with_texts
from jaxrl_llm.types import Completion

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CODE = "x = [1 , 2]\nprint( 'a' , x != y ) # ok ? We 're , n't ."


def byte_level(normalizer=None, decoder=decoders.ByteLevel, count=256, prefix=False, added=()):
    made = Tokenizer(models.BPE({byte: index for index, byte in enumerate(byte_alphabet()[:count])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    if normalizer is not None:
        made.normalizer = normalizer()
    if decoder is not None:
        made.decoder = decoder()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    return made


def with_bytes(prefix):
    """As Llama 2 and Gemma have it: spaces are a character, and bytes tokens of their own."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Dontsp", "▁D"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "D")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] * prefix
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


def lower_cased():
    tokens = ["[UNK]", *"don't stop : 12 ##34 ##5 = naive ##s a def".split()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def letters(*tokens, **options):
    vocabulary = {token: index for index, token in enumerate((*tokens, *"0123456789+-= "))}
    made = Tokenizer(models.BPE(vocabulary, [], **options))
    made.decoder = decoders.Fuse()
    return made


def cut_short():
    made = byte_level()
    made.enable_truncation(8)
    made.enable_padding(length=64)
    return made


def compatible():
    return normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])


def saved(folder, made, **settings):
    """The folder of a tokenizer, with these settings besides."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} if "<|im_end|>" in made.get_vocab() else {}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named | settings)
    )
    return folder


def model(folder, made, rows, eos=None, **settings):
    """The folder of a model with this tokenizer and so many rows in its embedding."""
    tokens = TokenIds(eos=() if eos is None else (eos,))
    config = ModelConfig("llama", rows, 8, 1, 16, Attention(2, 1, 4), tokens=tokens)
    save_pretrained(initialise(config, jax.random.key(0)), None, folder)
    return saved(folder, made, **settings)


def completion(tokens, reason="stop"):
    size = len(tokens)
    whole = np.ones(size, bool), np.zeros(size, np.int32)
    return Completion(np.asarray(tokens, np.int32), np.zeros(size, np.float32), reason, *whole)


@pytest.mark.parametrize(
    "made",
    [
        byte_level(),
        byte_level(normalizers.NFC),
        byte_level(normalizers.NFKC),
        byte_level(compatible),
        byte_level(prefix=True),
        byte_level(count=100),
        with_bytes(True),
        with_bytes(False),
        lower_cased(),
        letters(),
        letters("[?]", unk_token="[?]"),
        cut_short(),
    ],
    ids=str,
)
def test_a_tokenizer_of_its_own_kind_is_admitted(made, tmp_path):
    loaded = load_tokenizer(saved(tmp_path, made))
    made.no_truncation()
    made.no_padding()
    wanted = made.encode(PROBE, add_special_tokens=False).ids
    assert loaded(PROBE, add_special_tokens=False)["input_ids"] == wanted
    save_tokenizer(loaded, tmp_path / "again")
    assert load_tokenizer(tmp_path / "again")(PROBE, add_special_tokens=False)["input_ids"] == wanted


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace,
        decoders.WordPiece,
        lambda: decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)]),
        lambda: decoders.Sequence([decoders.ByteLevel(), decoders.Replace("  ", " ")]),
    ],
)
def test_a_tokenizer_that_does_not_spell_what_it_encodes_is_refused(decoder, tmp_path):
    with pytest.raises(InputError, match="and decodes it as") as refused:
        load_tokenizer(saved(tmp_path, byte_level(decoder=decoder)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "LlamaTokenizer"])
def test_the_ids_are_those_of_the_file_whatever_class_is_named(name, tmp_path):
    made = byte_level()
    loaded = load_tokenizer(saved(tmp_path, made, tokenizer_class=name))
    assert loaded(PROBE, add_special_tokens=False)["input_ids"] == made.encode(PROBE, add_special_tokens=False).ids
    decomposed = "e\u0301 of the decomposed form"
    assert text_of(loaded, loaded(decomposed, add_special_tokens=False)["input_ids"]) == decomposed


def test_a_text_is_what_the_tokens_spell(tmp_path):
    clean = ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(added=("<tool>",)), **dict.fromkeys(clean, True)))
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    for text, stops, wanted in (
        (CODE, (), CODE),
        (f"{CODE}<|im_end|>", (), CODE),
        ("<tool>a , b<|im_start|> !<|endoftext|>", (), "<tool>a , b<|im_start|> !<|endoftext|>"),
        ("a<|im_end|> ?<|endoftext|>", ids("<|endoftext|>"), "a<|im_end|> ?"),
        ("a<|im_end|>", ids("<|endoftext|>"), "a<|im_end|>"),
        ("a<tool>", ids("<tool>"), "a"),
        ("<|im_end|>", (), ""),
        ("", (), ""),
    ):
        assert with_texts({0: completion(ids(text))}, tokenizer, stops)[0].text == wanted
    assert with_texts({}, tokenizer) == {}


def test_a_token_without_a_row_is_refused_where_a_text_uses_it(tmp_path):
    made = byte_level(added=("<think>", "</think>"))
    _, tokenizer = load_pretrained(model(tmp_path / "m", made, 259, 258))
    tokenizer.chat_template = CHATML
    assert tokenizer("Say <|im_start|> now")["input_ids"][4] == 257
    chat = [{"role": "user", "content": "Why </think>?"}]
    for use in (
        lambda tokenizer: tokenizer("Say <think> now"),
        lambda tokenizer: tokenizer(["fine", "Say <think> now"], add_special_tokens=False, verbose=False),
        lambda tokenizer: tokenizer("fine", "<think>", return_tensors="np"),
        lambda tokenizer: tokenizer.encode("<think>", add_special_tokens=False),
        lambda tokenizer: tokenizer.apply_chat_template(chat),
    ):
        for one in (tokenizer, copy.deepcopy(tokenizer)):
            with pytest.raises(InputError, match=r"the token '</?think>', whose id 2(59|60) has no row.*259 rows"):
                use(one)
    save_tokenizer(tokenizer, tmp_path / "again")
    assert load_tokenizer(tmp_path / "again")("<think>")["input_ids"] == [259]


def test_an_embedding_may_be_larger_and_an_end_must_have_a_row(tmp_path):
    _, tokenizer = load_pretrained(model(tmp_path / "larger", byte_level(), 320, 258))
    assert type(tokenizer).__call__ is type(load_tokenizer(tmp_path / "larger")).__call__
    without_padding = byte_level(added=("[PAD]",))
    loaded, _ = load_pretrained(model(tmp_path / "padding", without_padding, 259, 258, pad_token="[PAD]"))
    assert loaded.config.tokens == TokenIds(None, (258,), None)
    with pytest.raises(InputError, match=r"end of a text, id 258, has no row.*set eos_token_id"):
        load_pretrained(model(tmp_path / "end", byte_level(), 258, None, chat_template=CHATML))


@pytest.mark.parametrize(
    ("settings", "listed", "named"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": list(SPECIAL[1:])}, list(SPECIAL[1:]), {}),
        *[({"extra_special_tokens": [SPECIAL[1]]}, [SPECIAL[1]], {})] * (transformers.__version__ >= "5"),
        ({"extra_special_tokens": {"image_token": SPECIAL[1]}}, [], {"image_token": SPECIAL[1]}),
        ({"tokenizer_class": "GPT2Tokenizer", "backend": "tokenizers", "is_local": True}, [], {}),
    ],
)
def test_what_is_saved_has_no_value_that_version_4_cannot_read(settings, listed, named, tmp_path):
    loaded = load_tokenizer(saved(tmp_path / "m", byte_level(), **settings))
    save_tokenizer(loaded, tmp_path / "again")
    written = json.loads((tmp_path / "again/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"is_local", "local_files_only", "backend"} & written.keys()
    assert written.get("additional_special_tokens", []) == listed and written.get("extra_special_tokens", {}) == named
    assert written["model_input_names"] == ["input_ids", "attention_mask"]
    again = load_tokenizer(tmp_path / "again")
    assert (again.eos_token, again.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert {*again.all_special_tokens} == {*loaded.all_special_tokens}
    assert again(PROBE)["input_ids"] == loaded(PROBE)["input_ids"]
