"""Trust in the code that a saved run names: its own classes, rewards, tools and environments, in files or packages.

Loading such a run executes these files. A run that this user made here has a signature: an HMAC (RFC 2104, SHA-256)
of its config.json, which has the SHA-256 of each copied module (``config.code``), and of the files of code that is not
copied, by a key in the user's cache directory that nobody else can read. A run without the right signature, or with
other copies, is refused, unless the user says that its code may be executed (``trusting``).
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import hmac
import importlib.machinery
import importlib.util
import json
import os
import secrets
import stat
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.origin import (
    FOLDERS,
    PREFIX,
    Origin,
    copies_of,
    copy_of,
    digest_of,
    execute,
    origin_of,
    own_module,
)
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.functions import Lost, UserFunction
from jaxrl_llm.system import storage
from jaxrl_llm.system.copies import import_copies
from jaxrl_llm.system.paths import cache_directory
from jaxrl_llm.system.setting import OURS, parts_of, with_parts

SIGNED = "signed"
"""The key of the signature in a config.json."""
KEY = "trust.key"
"""The file of the key in the cache directory."""
KEY_BYTES = 32
SHIPPED = tuple(f"{OURS}.{name}" for name in ("tasks.filters", "environments.examples"))
"""Modules of this package with functions that a configuration may name."""
LOST = f"{Lost.__module__}:{Lost.__qualname__}"
"""The type, in a config.json, of a reward that it does not hold."""
PLAIN = ("extractor", "answer_extractor")
"""Fields of this package's classes with texts such as ``tag:answer``, which look like names of functions."""
CHANGES = "changes"
"""The field of a phase with other settings, by their dotted names."""

TRUSTED: contextvars.ContextVar[bool] = contextvars.ContextVar("trusted", default=False)
"""Whether code of runs that others made may be executed, in this thread."""


@contextlib.contextmanager
def trusting(trusted: bool = True) -> Generator[None]:
    """Let the block load runs that others made, and execute their code; with False it may not."""
    token = TRUSTED.set(trusted)
    try:
        yield
    finally:
        TRUSTED.reset(token)


def named_code(data: Mapping[str, Any], origin: Origin, calls: bool = True) -> dict[str, str]:
    """Return the code outside this package that a config.json names, ``module:name``, with the file of each.

    A copy's file is below the run's directory; it is empty where there is none. Nothing is imported.

    Args:
      data: of the config.json.
      origin: its origin.
      calls: whether its functions may be called; otherwise only its classes are executed, and those whose file this
        process has executed already are left out.
    """
    found = {}
    for name, is_class in named({key: value for key, value in data.items() if key not in ("origin", "from", "chosen")}):
        module = name.partition(":")[0]
        if calls if not is_class else module in origin.modules and (calls or module not in sys.modules):
            copy = f"{storage.CODE}/{origin.copy}/{copy_of(module, origin)}" if module in origin.code else ""
            found[name] = copy or origin.modules.get(module) or _file_of(module.partition(".")[0], origin)
    return found


def lost_code(data: Mapping[str, Any], origin: Origin) -> dict[str, str]:
    """Return the configuration's file by the name of a reward that only this file has, and not the config.json."""
    parts = (part for part in parts_of(dict(data)) if isinstance(part, dict) and part.get("type") == LOST)
    return {str(part.get("name")): origin.config for part in parts if origin.config}


def with_lost(run: Any, path: Path) -> Any:
    """Return a run with the rewards that its config.json at ``path`` lacks, taken from its configuration's file.

    The file is executed only if this user made the run or trusts it; otherwise such a reward says how to.
    """
    data = json.loads(path.read_text())
    origin = origin_of(data)
    if not lost_code(data, origin):
        return run
    file, name = Path(str(origin.config)), f"{PREFIX}{Path(str(origin.config)).stem}"
    trusted = TRUSTED.get() or is_made_here(data, origin, path.parent)
    known = {}
    if trusted and (name in origin.code or file.is_file()):
        use_copies(path.parent, origin)
        module = own_module(name, origin) if name in origin.code else execute(file)
        held = (part for part in parts_of(getattr(module, "config", None)) if isinstance(part, UserFunction))
        known = {part.name: part for part in held}

    def found(part: Any) -> Any:
        if not isinstance(part, Lost):
            return part
        told = part.reason if trusted else f"{part.reason} (read {file}, and add --trust to execute it)"
        return known.get(part.name, dataclasses.replace(part, reason=told))

    return with_parts(run, found)


def use_copies(directory: Path, origin: Origin) -> None:
    """Import a run's own modules from its copies from now on, in place of others of their names."""
    usable = {name: copy for name, copy in copies_of(directory, origin).items() if copy[2] and name != "__main__"}
    for name, (_, _, digest) in usable.items():
        file = getattr(getattr(sys.modules.get(name), "__loader__", None), "path", "")
        if name in sys.modules and (not os.path.isfile(file) or digest_of(file) != digest):
            for other in usable:
                sys.modules.pop(other, None)
    import_copies(usable)


def named(value: Any, changes: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each name of code outside this package in the JSON of a configuration, and whether it is a class.

    A text that could be such a name counts, wherever it is: a class of somebody's own may take it for one.
    """
    if isinstance(value, list):
        for item in value:
            yield from named(item)
    elif isinstance(value, dict):
        kind = value.get("type")
        ours = isinstance(kind, str) and kind.partition(":")[0].partition(".")[0] == OURS
        if isinstance(kind, str) and not ours:
            yield kind, True
        for key, item in value.items():
            plain = (ours or changes) and key.rpartition(".")[2] in PLAIN and isinstance(item, str)
            if not plain and not (key == "type" and isinstance(item, str)):
                yield from named(item, ours and key == CHANGES)
    elif isinstance(value, str) and is_own_function(value):
        yield value, False


def is_own_function(text: str) -> bool:
    """Whether a text has the form of a function's name, ``module:function``, outside this package."""
    module, _, name = text.partition(":")
    return bool(module) and name.isidentifier() and module not in SHIPPED


def signed(data: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return the data of a config.json with this user's signature if it names code of its own, else without one.

    Without a key that can be made or read it is not signed: the next start then asks.
    """
    bare = json.loads(json.dumps({name: value for name, value in data.items() if name != SIGNED}))  # as it is read
    code = named_code(bare, origin) | lost_code(bare, origin)
    key = _key(make=True) if code else None
    return bare if key is None else bare | {SIGNED: _signature(key, bare, code)}


def is_made_here(data: Mapping[str, Any], origin: Origin, directory: Path) -> bool:
    """Whether the config.json of a run in a directory has this user's signature, and its code is what it was then."""
    key = _key(make=False)
    given = data.get(SIGNED)
    if key is None or not isinstance(given, str):
        return False
    bare = {name: value for name, value in data.items() if name != SIGNED}
    if any(copy[2] != origin.code[name] for name, copy in copies_of(directory, origin).items()):
        return False
    expected = _signature(key, bare, named_code(bare, origin) | lost_code(bare, origin))
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "backslashreplace"))


def tools_of_others(task: Any, path: Path) -> list[str]:
    """Return the tools of a task outside this package, if the run's config.json at ``path`` was not made here."""
    own = [tool for tool in getattr(task, "tools", ()) if isinstance(tool, str) and is_own_function(tool)]
    if not own or TRUSTED.get():
        return []
    data = json.loads(path.read_text())
    return [] if is_made_here(data, origin_of(data), path.parent) else own


def check_trust(path: Path, data: Mapping[str, Any], origin: Origin, calls: bool = True) -> bool:
    """Refuse the config.json of a run that names code of its own and was made by another user or elsewhere.

    Return whether it names any. ``calls``: as in ``named_code``.

    Raises:
      InputError: the line names the files.
    """
    code = named_code(data, origin, calls)
    if not code or is_made_here(data, origin, path.parent):
        return bool(code)
    files: dict[str, list[str]] = {}
    for name, file in sorted(code.items()):
        module = name.partition(":")[0]
        files.setdefault(str(path.parent / file) if module in origin.code else file or "no file", []).append(name)
    shown = [f"{', '.join(names)} in {file}" for file, names in files.items()]
    if TRUSTED.get():
        before = copies_of(path.parent, dataclasses.replace(origin, copy=origin.copy - 1))
        for name, (copy, _, digest) in copies_of(path.parent, origin).items():
            changed = before[name][2] not in ("", digest)
            if changed or copy not in files:
                shown.append(f"{copy} (changed since copy {origin.copy - 1})" if changed else copy)
        print(f"jaxrl-llm: {path.parent} executes code of its own: {'; '.join(shown)}", file=sys.stderr)
        return True
    more = f"; and {len(shown) - 3} more files" if len(shown) > 3 else ""
    raise InputError(
        f"{path.parent} uses code of its own ({'; '.join(shown[:3])}{more}), and was not made by you on this "
        "machine: read it, and add --trust to execute it"
    )


def _file_of(package: str, origin: Origin) -> str:
    """Return the file from which a package or module would be imported; of a package without file its folder."""
    loaded = getattr(sys.modules.get(package), "__file__", None)
    if loaded and not {os.path.dirname(loaded), os.path.dirname(os.path.dirname(loaded))} & set(FOLDERS):
        return os.path.abspath(loaded)
    own = [*map(str, reversed(origin.places())), *FOLDERS]
    others = [place for place in sys.path if place not in own]
    spec = importlib.machinery.PathFinder.find_spec(package, [*others, *own, os.getcwd()])
    if spec is None:
        return "Python itself" if package in sys.builtin_module_names else ""
    return os.path.abspath(spec.origin or next(iter(spec.submodule_search_locations or [""])))


def _signature(key: bytes, bare: Mapping[str, Any], code: Mapping[str, str]) -> str:
    text = json.dumps([bare, sorted(code.items())], sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    """Return the user's key; None if there is none, or another user could read or write it. ``make`` one if missing."""
    path = cache_directory() / KEY
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{KEY}.{os.getpid()}.{secrets.token_hex(4)}")
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "wb") as writer:
                writer.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was sooner
                os.link(part, path)
            part.unlink()
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as reader:
            state = os.fstat(reader.fileno())
            private = state.st_uid == os.getuid() and not stat.S_IMODE(state.st_mode) & 0o077
            key = reader.read(KEY_BYTES)
    except OSError:
        return None
    return key if private and len(key) == KEY_BYTES else None
