"""Checkpoints: everything that a run needs to resume, written by Orbax in the background, with checksums. A checkpoint
is one flat dict of arrays, named by path (``policy/blocks/attn/q``), and one JSON object of host state: data cursor,
surplus and unfinished groups, evaluations so far. Arrays of the host state, such as stored answers, are in a file next
to it. Random numbers need no state: they are functions of the run's seed and of counters.
"""

import contextlib
import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import codec
from jaxrl_llm.checkpoints.dependents import depended_on, set_aside
from jaxrl_llm.checkpoints.step_files import (
    CHECKSUMS,
    complete_step,
    file_sums,
    object_steps,
    object_sums,
    readable,
    remove_step,
    upload_step,
)
from jaxrl_llm.errors import InputError, one_line
from jaxrl_llm.sharding import as_shapes, replicated, shardings
from jaxrl_llm.sharding.rules import checksums_by_name
from jaxrl_llm.system import lease, storage
from jaxrl_llm.types import Role, TrainState


def flatten(state: TrainState) -> dict[str, Any]:
    """Return the arrays of a state by path, with fingerprints of the weights in place of a frozen base (``base/...``).
    Wrappers of the model library leave no trace in the names.
    """
    for name, role in state.roles.items():
        state = state.with_role(name, base=role.checksums, checksums=None)
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def unflatten(arrays: dict[str, Any], like: TrainState) -> TrainState:
    """Rebuild a state with the structure of ``like`` from the arrays of ``flatten``, without bases."""
    for name in like.roles:
        like = like.with_role(name, base=None, checksums=None)
    paths, treedef = jax.tree.flatten_with_path(like)
    return jax.tree.unflatten(treedef, [arrays[_name(path)] for path, _ in paths])


SHORT = {
    "roles/policy/params": "policy",
    "roles/policy/opt_state": "opt_state",
    "roles/policy/updates": "updates",
    "roles/policy/base": "base",
    "frozen/reference": "reference",
}
"""Short names in checkpoints for the parts that every run has."""


def _name(path: tuple) -> str:
    parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    name = "/".join(part for part in parts if part not in ("weights", "value"))
    for long, short in SHORT.items():
        if name == long or name.startswith(f"{long}/"):
            return short + name.removeprefix(long)
    return name


@dataclasses.dataclass(frozen=True)
class _Newest:
    """Orbax's preservation policy: the newest that count, the newest of all, and those that other runs depend on."""

    keep: int
    counts: Callable[[int], bool]
    folder: Path | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which of these checkpoints, the oldest first, are kept."""
        return self.kept([checkpoint.step for checkpoint in checkpoints])

    def kept(self, steps: Sequence[int]) -> list[bool]:
        """Return which of these steps, in rising order, are kept."""
        preserved = {*[step for step in steps if self.counts(step)][-self.keep :], *steps[-1:]}
        preserved |= set() if self.folder is None else depended_on(self.folder, steps)
        return [step in preserved for step in steps]


ARRAYS = "arrays.zlib"
"""The file of the host state's arrays, concatenated, next to its JSON."""
UNFINISHED = "*.orbax-checkpoint-tmp*"
"""Folders of steps in writing, or left behind by a killed process."""


class Checkpoints(contextlib.AbstractContextManager):
    """Owner of a run's ``checkpoints`` folder; a step is there completely or not at all. Close it, or use ``with``.
    ``directory``: the folder, or the mirror of one in object storage; made when first needed. ``keep``: the number of
    checkpoints to keep; None for all. ``counts``: whether a step counts towards these. Of the others, such as one at
    which a run was stopped, only the newest is kept, until there is a newer checkpoint.
    """

    def __init__(self, directory: Path, keep: int | None = 2, counts: Callable[[int], bool] = lambda step: True):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._directory = Path(directory).absolute()
        self._newest = None if keep is None else _Newest(keep, counts, self._directory)
        self._direct = storage.written_directly(self._directory)
        if not self._direct:  # only the way to the storage
            shutil.rmtree(self._directory, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._newest if self._direct else _Newest(1, counts),
            create=True,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        place = storage.place(self._directory) if self._direct else self._directory
        self._manager = ocp.CheckpointManager(place, options=options)
        self._arrays: dict[int, bytes] = {}  # of the host, by step, until they are written

    def save(self, step: int, state: TrainState, host: dict[str, Any], records: Sequence[type] = ()) -> None:
        """Start to write a step; the arrays are copied off the device before this returns, so the state may be donated.
        A checkpoint of this step from before the run was resumed at an earlier one is replaced, and set aside if other
        runs depend on it. ``host``: values for ``codec.to_json``, with these ``records`` in them.
        """
        if jax.process_index() == 0:
            set_aside(self._directory / str(step))
        if step in self._manager.all_steps():
            self._manager.delete(step)
        arrays = bytearray()
        host_json = codec.to_json(host, records, arrays)
        if jax.process_index() == 0:
            self._arrays[step] = bytes(arrays)
        items = self._args.Composite(state=self._args.StandardSave(flatten(state)), host=self._args.JsonSave(host_json))
        self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Wait until pending writes are complete."""
        self._manager.wait_until_finished()

    def restore(
        self, step: int, like: TrainState, mesh: Mesh, base: Any = None, checksums: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restore the state and host values of a complete step, laid out on this mesh, whichever mesh it was saved
        from. ``like``: shapes and dtypes of the state. ``base``: the frozen model, if ``like`` has one: a checkpoint
        holds only its fingerprint. ``checksums``: of the base, if it is not as it was read. InputError: the checkpoint
        has other arrays than this configuration, or another base.
        """
        self.wait()
        place = self._directory / str(step)
        frozen: dict[str, Any] = {}
        if like.policy.base is not None:
            checksums = checksums_by_name(base) if checksums is None else checksums
            checksums = jax.device_put(checksums, replicated(mesh))
            frozen = {"base": jax.device_put(base, shardings(base, mesh)), "checksums": checksums}
        like = like.with_role("policy", base=None, checksums=None)
        state = restore_parts(place, like, mesh, frozen.get("checksums"), complete=True)
        return state.with_role("policy", **frozen), read_host(place)

    def _seal(self) -> None:
        """Write the host's arrays and the checksums of a step, in the writing thread, before the step gets its final
        name or marker: no step exists without them.
        """
        if jax.process_index() != 0:
            return
        stored = storage.address(self._directory) != ""
        in_writing = list(self._directory.glob(UNFINISHED))
        if stored and self._direct:  # under the final name; a step is sealed before the next one is written
            in_writing = [storage.place(self._directory / str(next(iter(self._arrays))))]
        for step in in_writing:
            number = int(step.name.partition(".")[0])
            arrays = self._arrays.pop(number, b"")
            if arrays:
                (step / "host" / ARRAYS).write_bytes(zlib.compress(arrays, 1))
            if stored:
                self._seal_stored(step, self._directory / str(number))
                continue
            # Files next to the step's folders are Orbax's own.
            names = sorted(str(path.relative_to(step)) for path in step.glob("*/**/*") if path.is_file())
            (step / CHECKSUMS).write_text(json.dumps(file_sums(step, names)))

    def _seal_stored(self, step: Any, final: Path) -> None:
        """Seal a step in object storage, uploading that of ``s3://`` from ``step``; Orbax completes others."""
        lease.before_commit(self._directory.parent)
        if not self._direct:
            upload_step(step, final)
        storage.place(final / CHECKSUMS).write_text(json.dumps(object_sums(final)))
        if self._direct:
            return
        complete_step(final)
        steps = steps_in(self._directory)
        keeps = [True] * len(steps) if self._newest is None else self._newest.kept(steps)
        for number, keep in zip(steps, keeps, strict=True):
            if not keep:
                remove_step(self._directory / str(number))

    def close(self) -> None:
        """Wait for pending writes, and raise what one in the background raised (Orbax's own kinds; a full disk among
        them); unfinished ones are removed. Further calls do nothing.
        """
        manager = self._manager
        self._manager = None
        if manager is None:
            return
        try:
            manager.wait_until_finished()
        finally:
            manager.close()
            if jax.process_index() == 0:
                for unfinished in self._directory.glob(UNFINISHED):
                    shutil.rmtree(unfinished, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and jax.process_count() > 1:
            return  # a write is done when all processes are, and they may be gone: the next start removes what it left
        try:
            self.close()
        except Exception:
            if kind is None:  # an error that is under way already is the one to tell
                raise


def restore_policy(step_directory: Path, like: Any, mesh: Mesh, checksums: Any = None) -> Any:
    """Restore only the policy of a complete step, as ``restore_parts`` does; ``like`` is a model, or an adapter."""
    return restore_parts(step_directory, parts_of(like), mesh, checksums).policy.params


def parts_of(params: Any, opt_state: Any = None, role: str = "policy") -> TrainState:
    """Return a state of only these parts of a role, for ``restore_parts`` and ``holds``."""
    return TrainState({role: Role(params, opt_state, None)}, {})


def restore_parts(
    step_directory: Path, like: TrainState, mesh: Mesh, checksums: Any = None, complete: bool = False
) -> Any:
    """Restore parts of the state of a complete step, ``checkpoints/STEP``, on ``mesh``, whichever it was saved from;
    the arrays of the others are not read. ``like``: shapes and dtypes (``jax.eval_shape``) of the parts wanted; None in
    place of the others. ``checksums``: of the adapter's frozen model as it was read. ``complete``: refuse a checkpoint
    with other parts. InputError: the checkpoint is of another model or another base, or cannot be read.
    """
    import orbax.checkpoint as ocp

    shapes = flatten(as_shapes(like, shardings(like, mesh)))
    parts = {_part(name) for name in shapes} | {"base"}
    prints = jax.device_get(checksums or {})
    for name, x in prints.items():
        shapes[f"base/{name}"] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh))
    saved = _saved(step_directory)
    for name in sorted(saved.keys() | shapes.keys()):
        has = saved.get(name) if complete or _part(name) in parts else None
        wants = shapes[name].shape if name in shapes else None
        if has != wants:
            remedy = "give the model that it was trained from"
            if complete:
                remedy = "take the settings that it was saved with, or start over with --fresh"
            raise InputError(f"the checkpoint has {name} of shape {has}, this configuration {wants}: {remedy}")
    with ocp.PyTreeCheckpointer() as reader:
        args = ocp.args.PyTreeRestore(shapes, ocp.checkpoint_utils.construct_restore_args(shapes), partial_restore=True)
        arrays = reader.restore(readable(step_directory) / "state", args=args)
    for name, value in prints.items():
        if not np.array_equal(arrays[f"base/{name}"], value):
            raise InputError(
                f"the adapter was trained on another model than the loaded one ({name} differs): "
                "give the files it was started with, or start over with --fresh"
            )
    return unflatten(arrays, like)


def holds(step_directory: Path, like: TrainState) -> bool:
    """Whether a complete step has these parts of a state, in these shapes; ``like`` as for ``restore_parts``."""
    target = {_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(like)}
    saved = _saved(step_directory)
    return all(saved.get(name) == shape for name, shape in target.items())


def _part(name: str) -> str:
    """Return the part of a state that an array of a checkpoint belongs to: ``policy``, ``roles/critic/params``."""
    return "/".join(name.split("/")[: 3 if name.startswith("roles/") else 1])


def _saved(step_directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of a complete step by name. InputError: it cannot be read."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        try:
            tree = reader.metadata(readable(step_directory) / "state").item_metadata.tree
            return {name: tuple(meta.shape) for name, meta in tree.items()}
        except (OSError, ValueError, AttributeError) as error:
            reason = "it holds no state" if isinstance(error, AttributeError) else str(error).splitlines()[0]
            raise InputError(
                f"{step_directory} cannot be read ({reason}): remove it to go back to the step before"
            ) from None


def host_file(step_directory: Path) -> Any:
    """Return the path of the host state's JSON of a complete step: readable without JAX or Orbax."""
    return storage.place(step_directory / "host" / "metadata")


def read_host(step_directory: Path) -> Any:
    """Read the host state of a complete step: JSON values, and arrays that were stored as such."""
    path = host_file(step_directory)
    arrays = path.with_name(ARRAYS)
    try:
        packed = zlib.decompress(arrays.read_bytes()) if arrays.exists() else b""
        return codec.together(json.loads(path.read_text()), packed)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError, zlib.error) as error:
        raise InputError(
            f"{step_directory} cannot be read ({one_line(error, 200)}): remove it to go back to the step before"
        ) from None


def steps_in(directory: Path) -> list[int]:
    """Return the complete steps in a ``checkpoints`` folder, sorted, without starting JAX or Orbax."""
    if storage.address(directory):
        return sorted(object_steps(directory))
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isascii() and p.name.isdecimal())
