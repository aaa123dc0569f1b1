"""Load and save a model as a Hugging Face directory: config.json, safetensors, tokenizer."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig, TokenIds
from jaxrl_llm.models.hf_config import OURS, gives_scores, read_config, read_token_ids, write_config, write_token_ids
from jaxrl_llm.models.tokenizer import load_tokenizer, padded_with, save_tokenizer, special_ids
from jaxrl_llm.models.weights import (
    StoredTensor,
    open_checkpoint,
    read_json,
    read_parameters,
    to_stored,
    write_checkpoint,
    write_json,
)
from jaxrl_llm.system.signals import on_exit


def load_directory(directory: Path, dtype: str, mesh: Any) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) from a Hugging Face directory, parameters in ``dtype`` and laid out on the mesh.

    The model is a ``Decoder``, or the ``ScalarModel`` of a sequence classifier with one label. InputError where a file
    is missing or broken, an attribute cannot be obeyed, or a tensor does not fit.
    """
    from jaxrl_llm.models.decoder import Decoder
    from jaxrl_llm.models.heads import with_scalar_head

    attributes = read_json(directory / "config.json")
    config = read_config(attributes)
    generation = directory / "generation_config.json"
    tokenizer = load_tokenizer(directory)
    config = with_special_ids(config, read_json(generation) if generation.is_file() else {}, tokenizer)
    parameters = read_parameters(config, open_checkpoint(directory), dtype, mesh, gives_scores(attributes))
    scalar = parameters.pop("scalar", None)
    decoder = Decoder(config, parameters)
    return decoder if scalar is None else with_scalar_head(decoder, scalar), tokenizer


def save_pretrained(
    model: Any,
    tokenizer: Any | None,
    directory: str | os.PathLike,
    card: str | None = None,
    taught: Mapping[str, str] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a directory that transformers loads: config, generation config, weights, tokenizer.

    A ``ScalarModel`` becomes a sequence classifier with one label, for ``AutoModelForSequenceClassification``. It reads
    the score at the last token that is not padding, so config and tokenizer name a padding token that ends no text
    (``padding_id``); it may differ from the language model's.

    ``card`` is the text of README.md, or None for no such file; ``taught`` describes the training of a reward model,
    which config.json holds as ``jaxrl_llm`` (``stages.taught.Taught.to_json``); ``generation`` is the content of the
    generation config, but for the special ids, which are the model's. Weights above 5 GB are sharded. The
    directory appears whole or not at all; InputError where it exists and is not empty. The model's arrays must be
    addressable by this process.
    """
    from jaxrl_llm.models.decoder import to_parameters
    from jaxrl_llm.models.heads import split

    decoder, scalar = split(model)
    config = decoder.config
    parameters = to_parameters(decoder)
    attributes = write_config(config, parameters["embed"].dtype.name, scalar is not None)
    if scalar is not None:
        parameters["scalar"] = scalar
        attributes["pad_token_id"] = padding_id(config, tokenizer)
        tokenizer = None if tokenizer is None else padded_with(tokenizer, attributes["pad_token_id"])
        attributes |= {} if taught is None else {OURS: dict(taught)}
    with new_directory(directory, card) as folder:
        write_directory(folder, attributes, to_stored(config, parameters), tokenizer, generation or {})


def write_directory(
    folder: Path,
    attributes: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    tokenizer: Any | None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write every file of a model into an existing folder; ``attributes`` is the content of config.json, which has the
    special ids, and ``generation`` that of generation_config.json without them.
    """
    write_json(folder / "config.json", attributes)
    if not gives_scores(attributes):
        ids = write_token_ids(read_token_ids(attributes))
        others = {name: value for name, value in generation.items() if name not in ids}
        own = {name: value for name, value in ids.items() if value is not None}
        write_json(folder / "generation_config.json", others | own)
    write_checkpoint(stored, folder, attributes["torch_dtype"])
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


@contextlib.contextmanager
def new_directory(target: str | os.PathLike, card: str | None = None) -> Generator[Path]:
    """Yield a temporary folder next to ``target``; it is renamed to ``target`` on success and removed otherwise.

    ``card``: the text of its README.md, or None for no such file.
    """
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not empty; give a new directory, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True)
    with work, on_exit(lambda *reason: work.cleanup()):
        folder = Path(work.name)
        folder.chmod(0o755)
        if card is not None:
            (folder / "README.md").write_text(card, encoding="utf-8")
        yield folder
        os.replace(folder, target)


def with_special_ids(config: ModelConfig, generation: Mapping[str, Any], tokenizer: Any | None) -> ModelConfig:
    """Collect the special ids: ends from config, generation config and, for chat models, the tokenizer.

    Ids outside the vocabulary are dropped: no model can produce them.
    """
    sources = [config.tokens, read_token_ids(generation)]
    if tokenizer is not None:
        ends = (tokenizer.eos_token_id,) if tokenizer.chat_template and tokenizer.eos_token_id is not None else ()
        sources.append(TokenIds(tokenizer.bos_token_id, ends, tokenizer.pad_token_id))

    first = {}
    for name in ("bos", "pad"):
        found = (getattr(source, name) for source in sources)
        first[name] = next((i for i in found if i is not None and i < config.vocab_size), None)
    named = dict.fromkeys(i for source in sources for i in source.eos)
    ends = [i for i in named if i < config.vocab_size]
    if named and not ends:
        raise InputError(
            f"the model's end of a text, id {max(named)}, has no row in its embedding of {config.vocab_size} rows: set "
            "eos_token_id in config.json to a token that the model can write"
        )
    return dataclasses.replace(config, tokens=TokenIds(first["bos"], tuple(ends), first["pad"]))


def padding_id(config: ModelConfig, tokenizer: Any | None) -> int:
    """Return the padding id of a reward model's texts. It ends no text: scores are read at the last unpadded token.

    It is the model's own padding or beginning-of-text token, else a special token, else the smallest id.
    """
    tokens = config.tokens
    special = () if tokenizer is None else special_ids(tokenizer)
    candidates = (tokens.pad, tokens.bos, *special, *range(config.vocab_size))
    return next(i for i in candidates if i is not None and i < config.vocab_size and i not in tokens.eos)
