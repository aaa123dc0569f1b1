"""Fast tokenizers of transformers, without torch: read from a directory, or built from a byte-level BPE table."""

import copy
import dataclasses
import json
import os
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError, as_input_error, require

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not installed

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

PROBE = "Don't  stop: 12345 + 6 = 日本, naïve\n\n\tÀ bientôt!  "
"""Probe text on which tokenizers with different splitting rules differ."""
_PROBES = (PROBE, "def f(x):\n    return x[1 , 2] != 3  # ok ?", "1234567 e\u0301 \u0635\u0628\u0627 \U0001f642 I'LL")


@dataclasses.dataclass(frozen=True)
class BytePairs:
    """A byte-level BPE tokenizer as a value.

    Attributes:
      tokens: the text of each id, in GPT-2's byte alphabet.
      merges: pairs in order of priority.
      special: tokens that are cut out of the text whole, and left out of decoded text on request.
      added: likewise, but ordinary text when decoded.
      pre: how text is cut before the merges: "gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx", "qwen35", "lfm2", "glm4"
        or "none".
      begin: an encoded text starts with ``bos_token``.
      chat_template: Jinja, or None.
      names: transformers' names of special tokens (``eos_token``, ``pad_token``, ...).
      max_length: positions of the model, in tokens.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    pre: str = "gpt-2"
    begin: bool = False
    chat_template: str | None = None
    names: tuple[tuple[str, str], ...] = ()
    max_length: int = 2048


def load_tokenizer(directory: Path) -> Any | None:
    """Load the fast tokenizer of a directory; None if it holds no tokenizer files. It must encode probe texts as
    ``tokenizer.json`` does, and spell them when it decodes what it encoded (``_spells``): some releases of transformers
    build another one, by the class that tokenizer_config.json names; then the file alone counts.
    """
    if not any((directory / name).is_file() for name in _FILES):
        return None
    import tokenizers
    import transformers

    subject = f"{directory}: the tokenizer"
    with as_input_error(f"{subject} cannot be read", "fetch its files again"):
        file = directory / _FILES[0]
        backend = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else None
        kinds: tuple[Any, ...] = (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast)
        for kind, options in zip(kinds, ({}, {} if backend is None else _prefix(backend)), strict=True):
            tokenizer = kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **options)
            tokenizer("\U0010fffd")  # some wrong values are noticed where a text is encoded, some where it is unknown
            if backend is not None:
                backend.no_truncation()
                backend.no_padding()
            agrees = backend is None or all(
                _ids(tokenizer, probe) == backend.encode(probe, add_special_tokens=False).ids for probe in _PROBES
            )
            if agrees:
                break
        require(tokenizer.is_fast, f"{subject} has no fast form; save it once with its tokenizer.json")
        require(agrees, f"{subject} encodes text otherwise than its tokenizer.json; fetch all files of one model again")
        for probe in _PROBES:
            if not _spells(tokenizer, probe):
                decoded = text_of(tokenizer, _ids(tokenizer, probe))
                raise InputError(f"{subject} encodes {probe!r} and decodes it as {decoded!r}; fetch its files again")
    return tokenizer


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _prefix(backend: Any) -> dict[str, bool]:
    """Return tokenizer.json's ``add_prefix_space``, where it has one: version 4 takes it from the options."""
    rule = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    return {name: rule[name] for name in ("add_prefix_space",) if name in rule}


def _spells(tokenizer: Any, text: str) -> bool:
    """Whether the decoded ids of a text spell it. A tokenizer with a token for each byte must give the text back, or
    its normal form, and may begin it with a space. Others may leave out characters without a token, change case,
    accents and spaces, and write compatibility characters plainly; but what they decode must be in the text, in
    order.
    """
    backend = tokenizer.backend_tokenizer
    unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
    ids = [index for index in _ids(tokenizer, text) if index not in (tokenizer.unk_token_id, unknown)]
    decoded = text_of(tokenizer, ids)
    has_all_bytes = all(backend.token_to_id(byte) is not None for byte in byte_alphabet())
    if has_all_bytes and "ByteLevel" in str(backend.pre_tokenizer):
        normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
        return decoded.removeprefix(" ") in (text, normal)
    rest = iter(_plainly(text))
    return all(letter in rest for letter in _plainly(decoded.replace("\ufffd", "")))


def _plainly(text: str) -> list[str]:
    """Return the characters of a text that every normalisation leaves."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return [letter for letter in letters if not letter.isspace() and not unicodedata.combining(letter)]


def text_of(tokenizer: Any, tokens: Iterable[Any], ends: Collection[int] = ()) -> str:
    """Return exactly what tokens spell, special tokens included: every text that is judged, saved or shown. ``ends``:
    of these ids one at the end is left out.
    """
    ids = [int(token) for token in tokens]
    ids = ids[:-1] if ids and ids[-1] in ends else ids
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def limit_vocab(tokenizer: Any, rows: int) -> Any:
    """Make a tokenizer refuse a text with a token that has no row in a model's embedding; its class changes."""
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if not beyond:
        return tokenizer
    base: Any = type(tokenizer)

    class Within(base):
        def __call__(self, *texts: Any, **options: Any) -> Any:
            encoding = super().__call__(*texts, **options)
            for index in (index for row in encoding.encodings or () for index in row.ids if index in beyond):
                raise InputError(
                    f"a text has the token {beyond[index]!r}, whose id {index} has no row in the model's embedding of "
                    f"{rows} rows: leave it out of the text, or give a model that was resized for its tokenizer"
                )
            return encoding

        def encode(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
            return self(text, text_pair, **options)["input_ids"]

    Within.__name__ = base.__name__
    tokenizer.__class__ = Within
    return tokenizer


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write the tokenizer's files so that transformers 4 and 5 load them. tokenizer.json is all of it, so the class is
    the general one, which both know: some releases build another tokenizer by the name of a model's class. Version 4
    wants a list of special tokens by its old name.
    """
    from jaxrl_llm.models.weights import read_object, write_object

    tokenizer.save_pretrained(directory)
    config = read_object(directory / "tokenizer_config.json")
    extra = config.pop("extra_special_tokens", None) or {}
    special = config.pop("model_specific_special_tokens", {})
    if isinstance(extra, list):
        config["additional_special_tokens"] = extra
    else:
        special |= extra
    of_this_loading = ("backend", "is_local", "local_files_only", "trust_remote_code", "add_prefix_space")
    config = {name: value for name, value in config.items() if name not in of_this_loading}
    config |= {"extra_special_tokens": special} if special else {}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    config |= _prefix(tokenizer.backend_tokenizer)
    write_object(directory / "tokenizer_config.json", config)


def special_ids(tokenizer: Any) -> list[int]:
    """Return the sorted ids of the special tokens."""
    return sorted(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)


def with_pad_token(tokenizer: Any, index: int) -> Any:
    """Return a tokenizer that pads with this token; the same object if it already does. It does not pad at all if the
    token is text: as a special token it would be cut out of texts.
    """
    if tokenizer.pad_token_id == index:
        return tokenizer
    other = copy.deepcopy(tokenizer)
    other.pad_token = other.convert_ids_to_tokens(index) if index in special_ids(tokenizer) else None
    return other


def build_tokenizer(pairs: BytePairs) -> Any:
    """Build the transformers tokenizer of a byte-level BPE table."""
    import transformers
    from tokenizers import AddedToken, decoders, processors

    vocabulary = {token: index for index, token in enumerate(pairs.tokens)}
    tokenizer = _build_bpe(pairs.pre, vocab=vocabulary, merges=list(pairs.merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in pairs.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in pairs.added])
    if pairs.begin:
        bos = dict(pairs.names)["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=pairs.max_length,
        **dict(pairs.names),
    )  # fmt: skip
    fast.chat_template = pairs.chat_template
    return fast


def byte_pairs_of(tokenizer: Any) -> BytePairs:
    """Return the table of a tokenizer, the inverse of ``build_tokenizer``; unused ids get placeholder tokens."""
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    cuts = _split_rules(fields)
    rules = {name: _split_rules(json.loads(_build_bpe(name).to_str())) for name in _pre_tokenizers()}
    pre = next((name for name in rules if rules[name] == cuts), None)
    if fields["model"].get("type") != "BPE" or pre is None:
        raise InputError("the tokenizer is not a byte-level BPE known to GGUF files: write a directory")
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    added = fields["added_tokens"]
    first = tokenizer(PROBE)["input_ids"][0]
    names = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    pairs = BytePairs(
        tokens=tuple(texts.get(index, f"[PAD{index}]") for index in range(max(texts) + 1)),
        merges=tuple(tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in fields["model"]["merges"]),
        special=tuple(token["content"] for token in added if token["special"]),
        added=tuple(token["content"] for token in added if not token["special"]),
        pre=pre,
        begin=tokenizer.bos_token_id is not None and first == tokenizer.bos_token_id,
        chat_template=tokenizer.chat_template,
        names=tuple((name, text) for name, text in names.items() if text is not None),
        max_length=tokenizer.model_max_length,
    )
    if build_tokenizer(pairs)(PROBE)["input_ids"] != tokenizer(PROBE)["input_ids"]:
        raise InputError("the tokenizer does more than byte-level BPE, which GGUF files cannot hold: write a directory")
    return pairs


def byte_alphabet() -> tuple[str, ...]:
    """Return the characters of the 256 bytes in byte-level BPE (GPT-2): printable bytes are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return tuple(table[byte] for byte in range(256))


def _split_rules(fields: dict[str, Any]) -> str:
    """Return the rules that split text, as JSON; ``trim_offsets`` is normalised because offsets are not used."""
    parts = (fields["normalizer"], fields["pre_tokenizer"], bool(fields["model"].get("ignore_merges")))
    return json.dumps(parts, sort_keys=True).replace('"trim_offsets": false', '"trim_offsets": true')


def _build_bpe(pre: str, **table: Any) -> Any:
    """Build a byte-level BPE tokenizer with a splitting rule; without a table it only describes the rule."""
    from tokenizers import Tokenizer, models

    rules = _pre_tokenizers()
    if pre not in rules:
        raise InputError(f"the pre-tokenizer {pre!r} is not known here; load the model from a Hugging Face directory")
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "lfm2", "glm4"), **table))
    normalizer, tokenizer.pre_tokenizer = rules[pre]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def _pre_tokenizers() -> dict[str, tuple[Any, Any]]:
    """Return (normalizer or None, pre-tokenizer) of each known name."""
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    qwen2, llama3 = (
        Sequence([Split(Regex(f"{words}|{digits}|{rest}"), behavior="isolated"), bytes_only])
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    )
    marks = rf"{words}|\p{{N}}|{rest}".replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
    qwen35 = Sequence([Split(Regex(marks), behavior="isolated"), bytes_only])
    return {
        "none": (None, bytes_only),
        "gpt-2": (None, gpt2),
        "smollm": (None, Sequence([Digits(individual_digits=True), gpt2])),
        "qwen2": (normalizers.NFC(), qwen2),
        "llama-bpe": (None, llama3),
        "dbrx": (None, llama3),
        "qwen35": (normalizers.NFC(), qwen35),
        "lfm2": (None, llama3),
        "glm4": (None, llama3),
    }
