"""Everything that a run needs to continue, written by Orbax in the background.

A checkpoint is one flat dict of arrays, named by path (``policy/blocks/attn/q``), and one JSON object of what lives on
the host: data cursor, surplus and unfinished groups, evaluations so far; its arrays, of stored answers say, lie in a
file beside it. Random numbers need no state: they are
functions of the run's seed and of counters.
"""

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

from jaxrl_llm import codec, integrity
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.fingerprint import fingerprint
from jaxrl_llm.sharding import abstract, replicated, shardings
from jaxrl_llm.types import Role, TrainState


def flatten(state: TrainState) -> dict[str, Any]:
    """Arrays of a state by path, and in place of a frozen base (``base/...``) the fingerprint of each of its weights.

    Wrappers of the model library leave no trace in the names.
    """
    bases = {name: role.base for name, role in state.roles.items() if role.base is not None}
    for name, base in bases.items():
        state = state.with_role(name, base=_fingerprint(base))
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _fingerprint(model: Any) -> Any:
    """Fingerprints of a model's weights, as shapes where there are only shapes."""
    only_shapes = isinstance(jax.tree.leaves(model)[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(fingerprint, model) if only_shapes else fingerprint(model)


def unflatten(arrays: dict[str, Any], like: TrainState) -> TrainState:
    """The state with the structure of ``like`` and the arrays of ``flatten``; bases are not among them."""
    for name in like.roles:
        like = like.with_role(name, base=None)
    paths, treedef = jax.tree.flatten_with_path(like)
    return jax.tree.unflatten(treedef, [arrays[_name(path)] for path, _ in paths])


SHORT = {
    "roles/policy/params": "policy",
    "roles/policy/opt_state": "opt_state",
    "roles/policy/updates": "updates",
    "roles/policy/base": "base",
    "frozen/reference": "reference",
}
"""Names in checkpoints of what every run has: those from before there were other roles."""


def _name(path: tuple) -> str:
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    name = "/".join(part for part in parts if part not in ("weights", "value"))
    for long, short in SHORT.items():
        if name == long or name.startswith(f"{long}/"):
            return short + name.removeprefix(long)
    return name


@dataclasses.dataclass(frozen=True)
class _Newest:
    """Orbax's preservation policy: the newest checkpoints that count, and the newest of all."""

    keep: int
    counts: Callable[[int], bool]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of these stay, the oldest first."""
        steps = [one.step for one in checkpoints]
        kept = {*[step for step in steps if self.counts(step)][-self.keep :], *steps[-1:]}
        return [step in kept for step in steps]


ARRAYS = "arrays.zlib"
"""The arrays of what lives on the host, one after the other, beside its JSON."""
UNFINISHED = "*.orbax-checkpoint-tmp*"
"""Folders of steps that are being written, or that a kill has left behind."""


class Checkpoints:
    """Owner of a run's ``checkpoints`` folder; a step stands there completely or not at all. Close it, or use ``with``.

    Args:
      directory: the folder; made when first needed.
      keep: how many checkpoints stay; None for all.
      counts: of which steps those are. Of others, as of one at which a run was stopped, the newest checkpoint stays
        until there is a newer one.
    """

    def __init__(self, directory: Path, keep: int | None = 2, counts: Callable[[int], bool] = lambda step: True):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._directory = Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if keep is None else _Newest(keep, counts),
            create=True,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        # Without its handlers a manager that has saved nothing yet cannot say what a step holds.
        handlers = {"state": ocp.StandardCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        self._arrays: dict[int, bytes] = {}  # of the host, by step, until they are written

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Begin to write; the arrays are copied off the device before this returns, so the state may be donated.

        ``host``: JSON values and arrays.
        What is there of this step already was saved by a run that has gone on from before it since: it is replaced.
        """
        if step in self._manager.all_steps():
            self._manager.delete(step)
        host, arrays = codec.apart(host)
        if jax.process_index() == 0:
            self._arrays[step] = arrays
        items = self._args.Composite(state=self._args.StandardSave(flatten(state)), host=self._args.JsonSave(host))
        self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Until what is being written is there."""
        self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState, mesh: Mesh, base: Any = None) -> tuple[TrainState, dict[str, Any]]:
        """State and host values of a step, laid out on this mesh whatever mesh it was saved from.

        Args:
          step: a complete one.
          like: shapes and dtypes of the state.
          mesh: where the state is to live.
          base: the frozen model, where ``like`` has one: a checkpoint holds its fingerprint alone.

        Raises:
          InputError: the checkpoint holds other arrays than this configuration has, or is of another base.
        """
        self._manager.wait_until_finished()
        layout = shardings(like, mesh)
        target = flatten(abstract(like, layout))
        saved = self._manager.item_metadata(step)["state"]
        remedy = "take the settings that it was saved with, or start over with --fresh"
        _refuse_other({name: tuple(meta.shape) for name, meta in saved.tree.items()}, target, remedy)
        items = self._args.Composite(state=self._args.StandardRestore(target), host=self._args.JsonRestore())
        loaded = self._manager.restore(step, args=items)
        state = unflatten(loaded["state"], like)
        if like.policy.base is not None:
            refuse_other_base(loaded["state"], base)
            state = state.with_role("policy", base=jax.device_put(base, layout.policy.base))
        return state, codec.together(loaded["host"], _host_arrays(self._directory / str(step)))

    def _seal(self) -> None:
        """In the thread that writes, once all of a step is there but its name and the host's arrays: no step stands
        without these and its checksums."""
        if jax.process_index() == 0:
            for step in self._directory.glob(UNFINISHED):
                arrays = self._arrays.pop(int(step.name.partition(".")[0]), b"")
                if arrays:
                    (step / "host" / ARRAYS).write_bytes(zlib.compress(arrays, 1))
                integrity.seal(step)

    def close(self) -> None:
        """Wait for what is being written; what cannot be finished is removed. Further calls do nothing.

        Raises:
          Exception: of a write that failed in the background (Orbax's own kinds; a full disk among them).
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

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and jax.process_count() > 1:
            return  # a write is done when all processes are, and they may be gone: the next start removes what it left
        try:
            self.close()
        except Exception:
            if kind is None:  # an error that is under way already is the one to tell
                raise


def restore_policy(step_directory: Path, like: Any, mesh: Mesh, base: Any = None) -> Any:
    """The policy alone of one complete step, as ``restore_parts`` reads it; ``like`` is a model or an adapter."""
    return restore_parts(step_directory, parts_of_policy(like), mesh, base).policy.params


def parts_of_policy(params: Any, opt_state: Any = None) -> TrainState:
    """A state of which only these parts of the policy are wanted."""
    return TrainState({"policy": Role(params, opt_state, None)}, {})


def restore_parts(step_directory: Path, like: TrainState, mesh: Mesh, base: Any = None) -> TrainState:
    """Parts of the state of one complete step; the arrays of the others are not read.

    Args:
      step_directory: ``checkpoints/STEP``.
      like: shapes and dtypes (``jax.eval_shape``) of the parts wanted; None in place of the others.
      mesh: where they are to live, whatever mesh they were saved from.
      base: the frozen model beside the adapter, if there is one.

    Raises:
      InputError: the checkpoint is of another model, is of another base, or cannot be read.
    """
    import orbax.checkpoint as ocp

    paths, treedef = jax.tree.flatten_with_path(abstract(like, shardings(like, mesh)))
    target = {_name(path): leaf for path, leaf in paths}
    marks = (
        {} if base is None else {f"base/{_name(path)}": x for path, x in jax.tree.leaves_with_path(_fingerprint(base))}
    )
    wanted = target | {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)) for name, x in marks.items()
    }
    parts = {_part(name) for name in target} | {"base"}
    saved = {name: shape for name, shape in _saved(step_directory).items() if _part(name) in parts}
    _refuse_other(saved, wanted, "give the model that it was trained from")
    directory = Path(step_directory).absolute() / "state"
    with ocp.PyTreeCheckpointer() as reader:
        args = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True)
        arrays = reader.restore(directory, args=args)
    if base is not None:
        refuse_other_base(arrays, base)
    return jax.tree.unflatten(treedef, [arrays[name] for name in target])


def holds(step_directory: Path, like: TrainState) -> bool:
    """Whether one complete step has these parts of a state, in these shapes; ``like`` as for ``restore_parts``."""
    target = {_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(like)}
    saved = _saved(step_directory)
    return all(saved.get(name) == shape for name, shape in target.items())


def _part(name: str) -> str:
    """The part of a state that an array of a checkpoint belongs to: ``policy``, ``roles/critic/params``."""
    return "/".join(name.split("/")[: 3 if name.startswith("roles/") else 1])


def _saved(step_directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of one complete step by name.

    Raises:
      InputError: it cannot be read.
    """
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        try:
            found = reader.metadata(Path(step_directory).absolute() / "state").item_metadata.tree
            return {name: tuple(meta.shape) for name, meta in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            reason = "it holds no state" if isinstance(error, AttributeError) else str(error).splitlines()[0]
            raise InputError(
                f"{step_directory} cannot be read ({reason}): remove it to go back to the step before"
            ) from None


def refuse_other_base(saved: dict[str, Any], base: Any) -> None:
    """InputError unless the fingerprints among these arrays are those of ``base``."""
    found = jax.device_get(fingerprint(base))
    for path, value in jax.tree.leaves_with_path(found):
        name = _name(path)
        if not np.array_equal(saved[f"base/{name}"], value):
            raise InputError(
                f"the adapter was trained beside another model than the one that is loaded now ({name} differs): "
                "give the files it was begun with, or start over with --fresh"
            )


def _refuse_other(saved: dict[str, tuple[int, ...]], target: dict[str, Any], remedy: str) -> None:
    for name in sorted(saved.keys() | target.keys()):
        has = saved.get(name)
        wants = target[name].shape if name in target else None
        if has != wants:
            raise InputError(f"the checkpoint has {name} of shape {has}, this configuration {wants}: {remedy}")


def host_file(step_directory: Path) -> Path:
    """The JSON of what lived on the host, of one complete step: readable without JAX or Orbax."""
    return step_directory / "host" / "metadata"


def read_host(step_directory: Path) -> Any:
    """What lived on the host, of one complete step: JSON values, and arrays where they were written as such."""
    return codec.together(json.loads(host_file(step_directory).read_text()), _host_arrays(step_directory))


def _host_arrays(step_directory: Path) -> bytes:
    path = host_file(step_directory).with_name(ARRAYS)
    return zlib.decompress(path.read_bytes()) if path.exists() else b""


def steps_in(directory: Path) -> list[int]:
    """Complete steps in a ``checkpoints`` folder, found without starting JAX or Orbax."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())
