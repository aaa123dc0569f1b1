"""The origin of a run: recorded in config.json next to the settings, so that its files are found from anywhere.

A person's own modules next to a configuration stay importable for the life of the process, and config.json names them.
Reading a run executes them only for values of their classes, if this user made the run or trusts it.

A run that this user made here has a signature: an HMAC (RFC 2104, SHA-256) of its config.json, which has the SHA-256 of
each copied module (``config.code``), and of the files of code that is not copied, by a key in the user's cache
directory that nobody else can read. A run without the right signature, or with other copies, is refused, unless the
user says that its code may be executed (``trusting``).
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import hmac
import importlib
import importlib.machinery
import importlib.util
import json
import math
import os
import secrets
import stat
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.checkpoints.snapshots import standing
from jaxrl_llm.errors import InputError, one_line, require
from jaxrl_llm.learner.settings import Critic
from jaxrl_llm.rewards.functions import Lost, UserFunction
from jaxrl_llm.rules.guards import OF_RESULTS, best_step
from jaxrl_llm.system import storage
from jaxrl_llm.system.copies import COPIES, import_copies
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import cache_directory
from jaxrl_llm.system.setting import MODEL, OURS, PATH, annotations, is_ours, parts_of, with_parts

SAVED_RUNS = "runs"
"""The folder of runs: ``runs/NAME`` below the folder where the run began, unless ``run_dir`` says otherwise."""


FILES = "files"
"""The key of the fingerprint of a run's step."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The step, a checkpoint or a snapshot, of another ``run`` (its directory or address) that gives a run its first
    weights; ``carry``: whether the place in the data, the curriculum and the stored successes continue too.
    """

    run: str
    step: int
    carry: bool = False

    @property
    def name(self) -> str:
        """The step as ``RUN@STEP``."""
        return f"{self.run}@{self.step}"

    @property
    def directory(self) -> Path:
        """The folder of the run on this machine."""
        return storage.folder(self.run)


@dataclasses.dataclass(frozen=True)
class Pin:
    """The fixed version of a model that a run reads, from its first start to its end. ``step``: None if it is no run;
    ``weights``: fingerprints by the dtype read, or of a run's step's files under ``files``; empty if unknown.
    """

    step: int | None = None
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def mark(self) -> str:
        """The fingerprint of a step's files; empty if unknown."""
        return self.weights.get(FILES, "")

    def of(self, place: str) -> tuple[Path, int | None]:
        """Return the folder and the step of the pinned model at this place; None for the step of what is no run."""
        run, step = numbered_step(place)
        return storage.mirror(run), self.step if step is None else step


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a run's settings.

    Attributes:
      folder: where the run began; relative paths of data and models start there.
      config: the configuration's file; None for a run that was made in Python.
      modules: files of its own modules, by name: the configuration's, local ones that it imports, those of its classes.
      start: the step of another run with its first weights; None for those of the model.
      models: pins of the models that it reads, by their names there.
      changed: recorded changes of settings and of code, each with the step after which it was made.
      code: SHA-256 of the modules that are copied to ``RUN/code/N``, by name (``config.code``).
      copy: N, the number of the newest copy.
    """

    folder: str
    config: str | None = None
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: Start | None = None
    models: Mapping[str, Pin] = dataclasses.field(default_factory=dict)
    changed: Sequence[tuple[int, Sequence[str]]] = dataclasses.field(default_factory=list)
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    copy: int = 0

    def places(self) -> list[Path]:
        """Return the existing folders of its modules: the configuration's, then the one where the run began."""
        beside = [] if self.config is None else [Path(self.config).parent]
        return [folder for folder in (*beside, Path(self.folder)) if os.path.isdir(folder)]

    def to_json(self) -> dict[str, Any]:
        """Return the entries of config.json: ``origin``, and ``from`` if the run began with the weights of another."""
        origin = dataclasses.asdict(self)
        start = origin.pop("start")
        return {"origin": origin} | ({} if start is None else {"from": start})


def origin_of(data: Mapping[str, Any]) -> Origin:
    """Return the origin in a config.json; ValueError if it is none."""
    start = Start(**data["from"]) if "from" in data else None
    pins = {name: Pin(**found) for name, found in data["origin"]["models"].items()}
    found = Origin(**data["origin"] | {"models": pins}, start=start)
    given = [text for text in (found.config, start and start.run) if text is not None]
    texts = (found.folder, *given, *found.modules.values(), *found.code, *found.code.values())
    if all(isinstance(text, str) for text in texts) and isinstance(found.copy, int):
        return found
    raise ValueError("origin or from names no files")


OF_CRITIC = "recipe.critic.model"


BEST = "best"
"""The name of the step with a run's best evaluation, ``RUN@best``; and of the folder with its model."""
EVERY = "evaluation.every"
"""The setting of evaluations that does not change what they measure."""


def split_step(name: str) -> tuple[Path, int | None]:
    """Split ``RUN@STEP`` into a directory (of an address its mirror) and a step: None without one, or if a folder has
    this exact name. ``RUN@best`` gives the step of the best evaluation. InputError: an unreadable address, or no result
    yet.
    """
    run, step = numbered_step(name)
    if step is not None:
        return storage.folder(run), step
    run, _, word = name.rpartition("@")
    if word == BEST and run and not os.path.exists(name) and (storage.folder(run) / "config.json").is_file():
        best = recorded_best(storage.folder(run))
        missing = f"{name}: no evaluation has a result yet: train on to the first one, or give {run}@STEP"
        require(best is not None, missing)
        return storage.folder(run), best
    return storage.folder(name), None


def numbered_step(name: str) -> tuple[str, int | None]:
    """Split ``RUN@STEP`` into a name and a number, None for other names, as ``split_step``, reading no storage."""
    run, _, step = name.rpartition("@")
    return (run, int(step)) if run and step.isdecimal() and not os.path.exists(name) else (name, None)


def recorded_best(directory: Path, row: Mapping[str, Any] | None = None, last: float = math.inf) -> int | None:
    """Return the step of a run's best evaluation by its metrics.jsonl; 0 is the model that it began with, None without.
    ``row`` is of the step after those in the file; steps after ``last`` are left out.
    """
    try:
        changed = json.loads((directory / "config.json").read_text())["origin"]["changed"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # of a model, or damaged
        changed = ()
    rows = [one for one in read_rows(directory / "metrics.jsonl", OF_RESULTS) if one["step"] <= last]
    return best_step([*rows, *([] if row is None else [row])], other_tests(changed))


def other_tests(changed: Sequence[tuple[int, Sequence[str]]]) -> list[int]:
    """Return the steps of recorded changes after which evaluations are of other settings (``evaluation_key``)."""
    kinds = {step: {name.partition(":")[0] for name in names} for step, names in changed}
    return [step for step, names in kinds.items() if any(n.startswith("evaluation.") for n in names - {EVERY})]


def with_step_numbers(run: Any, origin: Origin, pinned_names: Iterable[str] = ()) -> Any:
    """Return the run with ``RUN@STEP`` in place of each model ``RUN@best``: the step of its pin, or else the best now.
    ``pinned_names``: of the pinned models of a run that has begun.
    """

    def number(name: str, marks: Sequence[Any]) -> str:
        run, _, step = name.rpartition("@")
        if step != BEST or MODEL not in marks:
            return name
        pinned = [pin for pin in pinned_names if pin.startswith(f"{run}@") and pin.rpartition("@")[2].isdecimal()]
        step = split_step(place_of(name, origin, None))[1] if not pinned else None
        return pinned[0] if pinned else name if step is None else f"{run}@{step}"

    return _with_names(run, number)


def without_step(name: str) -> str:
    """Return ``RUN`` for ``RUN@STEP``, and any other name unchanged."""
    step = split_step(name)[1]
    return name if step is None else name.rpartition("@")[0]


def located(run: Any, origin: Origin, directory: Path | None = None, pinned: bool = False) -> Any:
    """Return the run with relative paths of data and models expanded if they are not found from the current folder. The
    first is taken that exists in the folder where the run began, next to its configuration, above ``runs/`` where its
    ``directory`` is now, or in the current folder. ``pinned``: first put ``RUN@STEP`` in place of each ``RUN`` that is
    pinned to a step, and the run's copy of it in place of one that is gone or has changed.
    """

    def placed(name: str, marks: Sequence[Any]) -> str:
        is_pinned = pinned and MODEL in marks and name in origin.models
        return standing_place(name, origin, directory) if is_pinned else place_of(name, origin, directory)

    return _with_names(run, placed)


def standing_place(name: str, origin: Origin, directory: Path | None) -> str:
    """Return the place of a pinned model, with its step if it is a run, where it is as it was."""
    pin, place = origin.models[name], place_of(name, origin, directory)
    run, step = pin.of(place)
    if step is None:
        return place
    path_standing = standing(run, step, pin.mark, *([] if directory is None else [directory]))
    return f"{numbered_step(place)[0] if path_standing in (None, run) else storage.named(path_standing)}@{step}"


def _with_names(run: Any, change: Callable[[str, Sequence[Any]], str]) -> Any:
    """Return the run with other names of models, files and folders; ``change`` takes a name and its field's marks."""

    def changed(part: Any) -> Any:
        new = {}
        for field, marks in _naming(type(part)).items():
            field_value = getattr(part, field)
            if isinstance(field_value, (tuple, list)):
                new[field] = tuple(change(name, marks) for name in field_value)
            elif field_value is not None:
                new[field] = change(field_value, marks)
        return dataclasses.replace(part, **new) if new else part

    return with_parts(run, changed)


@functools.cache
def _naming(kind: type) -> dict[str, Sequence[Any]]:
    """Return the marks of the fields of a class of settings that name models, files or folders."""
    return {name: marks for name, (_, marks) in annotations(kind).items() if MODEL in marks or PATH in marks}


def place_of(text: str, origin: Origin, directory: Path | None) -> str:
    """Resolve a relative path by the rules of ``located``; return it unchanged if no folder has it."""
    if Path(text).is_absolute() or not text or storage.split(text):
        return text
    folders = [Path(origin.folder), *([] if origin.config is None else [Path(origin.config).parent])]
    if directory is not None and directory.absolute().parent.name == SAVED_RUNS:
        folders.append(directory.absolute().parent.parent)
    run, _, step = text.rpartition("@")
    names = (text, run) if run and (step.isdecimal() or step == BEST) else (text,)
    for folder in folders:
        if any(os.path.exists(folder / name) for name in names):
            return text if folder == Path.cwd() else str(folder / text)
    return text


def models_of(run: Any) -> Iterator[tuple[str, str]]:
    """Yield each model name in the settings, and the field or reward with it."""
    yield run.model, "model"
    for part in parts_of(run):
        for field, marks in _naming(type(part)).items():
            if MODEL in marks and part is not run:
                names = getattr(part, field) or ()
                label = OF_CRITIC if isinstance(part, Critic) else getattr(part, "label", None) or f"reward {part.name}"
                yield from ((name, label) for name in ((names,) if isinstance(names, str) else names))


PREFIX = f"{OURS}_config_"
"""The prefix of the module name of a configuration's file."""
FOLDERS: list[str] = []
"""Configurations' folders on ``sys.path``, the newest first; global to the process, as ``sys.path`` is."""


def execute(path: Path) -> ModuleType:
    """Execute a configuration's file; it can import modules next to it. InputError: what it raises, with its line."""
    folder = path.absolute().parent
    names, name = make_findable(folder), f"{PREFIX}{path.stem}"
    for other, (_, file, _) in list(COPIES.items()):  # what lies there is executed, not the copy that a run has of it
        if other == name or other.partition(".")[0] in names or Path(file).is_relative_to(folder):
            del COPIES[other]
            sys.modules.pop(other, None)
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a person's file raises
        del sys.modules[name]
        if isinstance(error, InputError):
            raise
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
        else:  # the last frame in the configuration's folder
            frames = traceback.extract_tb(error.__traceback__)
            own_frames = [frame for frame in frames if Path(frame.filename).absolute().parent == folder]
            where = f"{own_frames[-1].filename}, line {own_frames[-1].lineno}" if own_frames else path
        raise InputError(f"{where}: {type(error).__name__}: {error}; correct the configuration") from error
    return module


def make_findable(folder: Path) -> set[str]:
    """Make the modules in a configuration's folder importable in this process and in those started later, after
    installed ones and before those of earlier configurations; return their names.
    """
    here = str(folder)
    earlier = [place for place in FOLDERS if place != here]
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    stale = set()  # modules of earlier folders that share a name with one in this folder
    for name in names & sys.modules.keys():
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        if str(file.absolute().parents[int(file.name == "__init__.py")]) in earlier:
            stale.add(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in stale]:
        del sys.modules[name]
    before = next((index for index, place in enumerate(sys.path) if place in earlier), len(sys.path))
    if here not in sys.path[:before]:
        sys.path[:] = [*sys.path[:before], here, *(place for place in sys.path[before:] if place != here)]
    FOLDERS[:] = [here, *earlier]
    importlib.invalidate_caches()
    return names


def own_modules(value: Any) -> dict[str, str]:
    """Return the files of modules outside this package that define classes of ``value``'s parts, by module name."""
    kinds = {type(part) for part in parts_of(value) if dataclasses.is_dataclass(part)}
    names = {kind.__module__ for kind in kinds if not is_ours(kind)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names - {"__main__"})}
    return {name: os.path.abspath(file) for name, file in files.items() if file}


def why_not_found(kind: type) -> str:
    """Explain why a class cannot be found again by its module's name; return an empty string if it can."""
    if is_ours(kind) and "<locals>" not in kind.__qualname__:
        return ""
    if kind.__module__ == "__main__":
        return f"its class {kind.__qualname__} is defined in the program itself or in a notebook: put it into a module"
    module = sys.modules.get(kind.__module__)
    importable = "<locals>" not in kind.__qualname__ and getattr(module, "__file__", None) is not None
    return "" if importable else f"its class {kind.__qualname__} is not at the top of a file: put it there"


def find_class(name: str, origin: Origin | None) -> type | None:
    """Return the dataclass that ``module:class`` names, in this package or in the origin's modules; None for others.
    InputError: the file of such a module is not found, or is another. ImportError: the module raises it.
    """
    module_name, _, path = name.partition(":")
    if module_name.partition(".")[0] == OURS:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:  # a library is missing
                raise
            return None
    elif origin is not None and module_name in origin.modules:
        module = own_module(module_name, origin)
    else:
        return None
    attribute: Any = module
    for part in path.split("."):
        attribute = getattr(attribute, part, None)
        if not isinstance(attribute, type):
            return None
    allowed = is_ours(attribute) or (origin is not None and attribute.__module__ in origin.modules)
    return attribute if allowed and dataclasses.is_dataclass(attribute) else None


def own_module(name: str, origin: Origin) -> ModuleType:
    """Return an own module of a run: the loaded one, else from the run's copy of it (``import_copies``), else from its
    file. InputError: the file is missing or another, or whatever it raises.
    """
    file, loaded = origin.modules[name], sys.modules.get(name)
    exists = loaded is not None or name in COPIES or os.path.isfile(file)
    require(exists, f"it has classes of {file}, which is missing: put it back")
    try:
        alone = loaded is None and name.startswith(PREFIX) and name not in COPIES
        module = execute(Path(file)) if alone else importlib.import_module(name)
    except Exception as error:  # whatever a person's file raises
        raise error if isinstance(error, InputError) else InputError(f"{file}: {one_line(error)}") from error
    same = name in origin.code or os.path.realpath(str(module.__file__)) == os.path.realpath(file)
    require(same, f"the module {name} is {module.__file__} here, and the run has {file}: rename one of them")
    return module


def copies_of(directory: Path, origin: Origin) -> dict[str, tuple[str, str, str]]:
    """Return the run's copy of each own module, as in ``COPIES``, with the SHA-256 of its bytes now, empty without a
    file. The module's own file stands for a missing copy if it is the same; no links are followed.
    """
    found = {}
    for name, digest in origin.code.items():
        file, inside = origin.modules.get(name, ""), f"{storage.CODE}/{origin.copy}/{copy_of(name, origin)}"
        place = str((directory / inside).absolute())
        plain = os.path.realpath(place) == os.path.join(os.path.realpath(directory), inside) and os.path.isfile(place)
        now = digest_of(place) if plain else ""
        same = not plain and os.path.isfile(file) and digest_of(file) == digest
        found[name] = (file, file, digest) if same else (place, file, now)
    return found


def digest_of(file: str) -> str:
    """Return the SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def copy_of(name: str, origin: Origin) -> str:
    """Return the place of the copy of a module, below ``RUN/code/N``."""
    file = Path(origin.modules.get(name, "")).name
    alone = name == "__main__" or name.startswith(PREFIX)
    path = name.replace(".", "/")
    return file if alone else f"{path}/{file}" if file == "__init__.py" else f"{path}.py"


def changed_code(before: Origin, after: Origin) -> list[str]:
    """List the differences of two copies of a run's own code, as ``code/FILE changed``."""
    old, new = ({copy_of(name, one): digest for name, digest in one.code.items()} for one in (before, after))
    words = {name: "removed" if name not in new else "changed" if name in old else "added" for name in old | new}
    return [f"{storage.CODE}/{name} {words[name]}" for name in sorted(words) if old.get(name) != new.get(name)]


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
    """Return the code outside this package that a config.json names, ``module:name``, with the file of each: a copy's
    is below the run's directory, and empty where there is none. Nothing is imported. ``calls``: whether its functions
    may be called; otherwise only classes count whose file this process has not executed already.
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
    """Return a run with the rewards that its config.json at ``path`` lacks, from its configuration's file, which is
    executed only if this user made the run or trusts it; otherwise such a reward says how to.
    """
    data = json.loads(path.read_text())
    origin = origin_of(data)
    if not lost_code(data, origin):
        return run
    file, name = Path(str(origin.config)), f"{PREFIX}{Path(str(origin.config)).stem}"
    trusted = TRUSTED.get() or is_made_here(data, origin, path.parent)
    functions = {}
    if trusted and (name in origin.code or file.is_file()):
        use_copies(path.parent, origin)
        module = own_module(name, origin) if name in origin.code else execute(file)
        parts = (part for part in parts_of(getattr(module, "config", None)) if isinstance(part, UserFunction))
        functions = {part.name: part for part in parts}

    def found(part: Any) -> Any:
        if not isinstance(part, Lost):
            return part
        reason = part.reason if trusted else f"{part.reason} (read {file}, and add --trust to execute it)"
        return functions.get(part.name, dataclasses.replace(part, reason=reason))

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
    """Yield each name of code outside this package in the JSON of a configuration, and whether it is a class. Any text
    of this form counts: a class of somebody's own may take it for a name.
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
    """Return the data of a config.json with this user's signature if it names code of its own and there is a key, else
    without one: the next start then asks.
    """
    bare = json.loads(json.dumps({name: value for name, value in data.items() if name != SIGNED}))  # as it is read
    code = named_code(bare, origin) | lost_code(bare, origin)
    key = _key(make=True) if code else None
    return bare if key is None else bare | {SIGNED: _signature(key, bare, code)}


def is_made_here(data: Mapping[str, Any], origin: Origin, directory: Path) -> bool:
    """Whether the config.json of a run in a directory has this user's signature, and its code is what it was then."""
    key = _key(make=False)
    signature = data.get(SIGNED)
    if key is None or not isinstance(signature, str):
        return False
    bare = {name: value for name, value in data.items() if name != SIGNED}
    if any(copy[2] != origin.code[name] for name, copy in copies_of(directory, origin).items()):
        return False
    expected = _signature(key, bare, named_code(bare, origin) | lost_code(bare, origin))
    return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "backslashreplace"))


def tools_of_others(task: Any, path: Path) -> list[str]:
    """Return the tools of a task outside this package, if the run's config.json at ``path`` was not made here."""
    own_tools = [tool for tool in getattr(task, "tools", ()) if isinstance(tool, str) and is_own_function(tool)]
    if not own_tools or TRUSTED.get():
        return []
    data = json.loads(path.read_text())
    return [] if is_made_here(data, origin_of(data), path.parent) else own_tools


def check_trust(path: Path, data: Mapping[str, Any], origin: Origin, calls: bool = True) -> bool:
    """Refuse the config.json of a run that names code of its own and was made by another user or elsewhere; return
    whether it names any. ``calls``: as in ``named_code``. InputError names the files.
    """
    code = named_code(data, origin, calls)
    if not code or is_made_here(data, origin, path.parent):
        return bool(code)
    files: dict[str, list[str]] = {}
    for name, file in sorted(code.items()):
        module = name.partition(":")[0]
        files.setdefault(str(path.parent / file) if module in origin.code else file or "no file", []).append(name)
    listing = [f"{', '.join(names)} in {file}" for file, names in files.items()]
    if TRUSTED.get():
        before = copies_of(path.parent, dataclasses.replace(origin, copy=origin.copy - 1))
        for name, (copy, _, digest) in copies_of(path.parent, origin).items():
            changed = before[name][2] not in ("", digest)
            if changed or copy not in files:
                listing.append(f"{copy} (changed since copy {origin.copy - 1})" if changed else copy)
        print(f"jaxrl-llm: {path.parent} executes code of its own: {'; '.join(listing)}", file=sys.stderr)
        return True
    more = f"; and {len(listing) - 3} more files" if len(listing) > 3 else ""
    raise InputError(
        f"{path.parent} uses code of its own ({'; '.join(listing[:3])}{more}), and was not made by you on this "
        "machine: read it, and add --trust to execute it"
    )


def _file_of(package: str, origin: Origin) -> str:
    """Return the file from which a package or module would be imported; of a package without file its folder."""
    loaded = getattr(sys.modules.get(package), "__file__", None)
    if loaded and not {os.path.dirname(loaded), os.path.dirname(os.path.dirname(loaded))} & set(FOLDERS):
        return os.path.abspath(loaded)
    own_places = [*map(str, reversed(origin.places())), *FOLDERS]
    other_places = [place for place in sys.path if place not in own_places]
    spec = importlib.machinery.PathFinder.find_spec(package, [*other_places, *own_places, os.getcwd()])
    if spec is None:
        return "Python itself" if package in sys.builtin_module_names else ""
    return os.path.abspath(spec.origin or next(iter(spec.submodule_search_locations or [""])))


def _signature(key: bytes, bare: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Return the HMAC of a config.json without its signature, and of the files of code that is not copied."""
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
