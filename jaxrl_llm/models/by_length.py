"""Decode attention by length: which columns of a cache are live, and in which order kernels read them.

Lengths are data, so one program serves rows of every length (``by_length_kernels``). CPUs have the plain form.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.models.config import Attention
from jaxrl_llm.sharding import batch_parts, platform_of

LANES, SUBLANES = 128, 8
"""A TPU's tile of float32, its last dimension first."""
LEAST_BLOCK, COLUMNS_OF_BLOCK = LANES, ((4096, 512), (2048, 256))
"""Columns of a block of a short cache, then of longer ones: (least columns of the cache, of a block)."""
GPU_BLOCK, GPU_SPAN, GPU_ROWS = 64, 2048, 16
"""Columns that a GPU's kernel reads at once, and the most that one of its programs reads: a long row has several; and
least queries of a program, those of a tensor core.
"""


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Choice of the kernels.

    Attributes:
      platform: "tpu" or "gpu".
      interpret: XLA computes what the kernels would, slowly, on any platform: for tests.
    """

    platform: str
    interpret: bool = False


class Seen(NamedTuple):
    """The columns that queries may see: ``least <= column < limit``; int32, one number for each query or several."""

    least: jax.Array
    limit: jax.Array

    def each(self, change: Callable[[jax.Array], jax.Array]) -> "Seen":
        """Return the bounds changed alike."""
        return Seen(change(self.least), change(self.limit))


def seen(limit: jax.Array, newest: jax.Array, window: Any) -> Seen:
    """Return the columns below ``limit`` in a window that ends with column ``newest``; window 0 has no beginning."""
    return Seen(jnp.where(window == 0, 0, jnp.maximum(newest - window + 1, 0)), limit)


class PartialAttention(NamedTuple):
    """Attention of queries over some of their columns, float32.

    Attributes:
      top: [B, K, M, 1], the largest score.
      mass: [B, K, M, 1], the sum of exp(score - top).
      mixed: [B, K, M, H], the values weighted by exp(score - top).
    """

    top: jax.Array
    mass: jax.Array
    mixed: jax.Array


def form_for(config: Attention, slots: int, mesh: Mesh | AbstractMesh | None) -> ByLength | None:
    """Return the kernels for a model and a mesh; None for the plain form, which reads all columns of every row.

    CPUs have no kernels. A GPU's want heads of a power of two, and no mesh may divide the slots unevenly.
    """
    platform = jax.default_backend() if mesh is None else platform_of(mesh)
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform not in ("tpu", "gpu") or (mesh is not None and slots % batch_parts(mesh)):
        return None
    width = config.head_dim
    powers = width & (width - 1) == 0 and 16 <= width <= 256
    return ByLength(platform) if platform == "tpu" or powers else None


def block_columns(columns: int) -> int:
    """Return the columns of a block in a cache of so many."""
    return next((block for least, block in COLUMNS_OF_BLOCK if columns >= least), LEAST_BLOCK)


def whole_blocks(columns: int) -> int:
    """Return the columns of a cache for so many, in whole blocks."""
    block = block_columns(columns)
    return -(-columns // block) * block


def columns_read(form: ByLength, live: int, columns: int) -> int:
    """Return the columns that are read of a row of ``columns`` of which ``live`` are live: whole blocks."""
    block = _block(form, columns)
    return -(-live // block) * block


def _block(form: ByLength, columns: int) -> int:
    return block_columns(columns) if form.platform == "tpu" else min(columns, GPU_BLOCK)


def live_blocks(seen: Seen, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the first block of each row that any of its queries sees, and the number of blocks from there to the last.

    ``seen``: [B, M].
    """
    some = seen.limit > seen.least
    first = jnp.min(jnp.where(some, seen.least, jnp.iinfo(jnp.int32).max), axis=1) // block
    end = -(-jnp.max(jnp.where(some, seen.limit, 0), axis=1) // block)
    return jnp.minimum(first, end), jnp.maximum(end - first, 0)


class Reads(NamedTuple):
    """The order in which a TPU's kernel reads blocks; int32[halves * steps] but for the last.

    Attributes:
      row: of the half, for which a step computes; row * halves + half of all.
      block: row of the half * blocks of a row + block; a step that reads nothing repeats a neighbour's.
      live: whether the step computes anything.
      steps: int32[1], of the longer half.
    """

    row: jax.Array
    block: jax.Array
    live: jax.Array
    steps: Any = None


class Reading(NamedTuple):
    """The columns that a kernel reads of a cache's rows, and how it comes to them.

    Attributes:
      seen: [E, lanes], of each lane; [E, 1] without lanes.
      order: ``Reads`` of a TPU; of a GPU the first live block of each row and the end of these, int32[E].
      lanes: int32[E, lanes], the row of queries that a lane of the cache's row serves, negative if none; None if each
        row of queries reads the cache's row of its own number.
      begun: bool[B], whether a lane serves the row of queries; None without lanes.
    """

    seen: Seen
    order: Any
    lanes: Any = None
    begun: Any = None


def reading(form: ByLength, seen: Seen, columns: int, lanes: Any = None, begun: Any = None) -> Reading:
    """Return the reading of so much of rows of ``columns`` columns."""
    block = _block(form, columns)
    if form.platform == "tpu":
        return Reading(seen, reads(seen, block, columns // block, lanes is not None), lanes, begun)
    first, count = live_blocks(seen, block)
    return Reading(seen, (first, first + count), lanes, begun)


def reads(seen: Seen, block: int, each: int, sparse: bool = False) -> Reads:
    """Return the reads of rows of ``each`` blocks: the rows in order, every other in a half where a chip has two cores.

    A row without a visible column still has one step, which reads nothing; none if ``sparse``.
    """
    halves = halves_of(len(seen.limit))
    first, count = (x.reshape(-1, halves).T for x in live_blocks(seen, block))
    rows = first.shape[1]
    places = jnp.arange(rows * each, dtype=jnp.int32)

    def half(first: jax.Array, count: jax.Array) -> Reads:
        taken = count if sparse else jnp.maximum(count, 1)
        ends = jnp.cumsum(taken)
        row = jnp.sum(ends[None] <= places[:, None], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, rows - 1)
        inside = places - (ends - taken)[row]
        live = inside < count[row]
        known = jax.lax.cummax(jnp.where(live, places, -1))
        known = jnp.where(known < 0, jnp.argmax(live).astype(jnp.int32), known)
        own = jnp.minimum(row * each + first[row] + inside, rows * each - 1)
        return Reads(row, own[known], live.astype(jnp.int32), jnp.maximum(ends[-1], 1))

    found = jax.vmap(half)(first, count)
    row, blocks, live = (x.reshape(-1) for x in found[:3])
    return Reads(row, blocks, live, jnp.max(found.steps, keepdims=True))


def halves_of(rows: int) -> int:
    """Return the number of parts of the rows that a TPU's kernel works on side by side."""
    return 2 if rows % 2 == 0 else 1


def fetched(half: Any, number: Any, table: Reads, rows: int, each: int) -> tuple[Any, Any, Any]:
    """Return the row computed in a step of a TPU's kernel, and the row and the block that it reads."""
    halves = halves_of(rows)
    at = half * (rows // halves * each) + number
    read = table.block[at]
    # Signed division of Python's kind asks which TPU is there, and none need be.
    row = jax.lax.div(read, jnp.int32(each))
    return table.row[at] * halves + half, row * halves + half, jax.lax.rem(read, jnp.int32(each))


class Near(NamedTuple):
    """The columns of the chunk: one layer's k [B, K, H, C] and v [B, K, C, H], and ``Seen`` of all rows, int32[2]."""

    k: Any
    v: Any
    seen: jax.Array


def takes_near(form: ByLength, columns: int) -> bool:
    """Whether the kernel of a cache's own rows can read a chunk of so many columns too."""
    return form.platform == "gpu" and columns >= GPU_ROWS and columns & (columns - 1) == 0
