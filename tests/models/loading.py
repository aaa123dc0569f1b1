"""Loads a model in a process of its own and prints what that took, as JSON: ``loading.py memory|count DIRECTORY [RANK
PORT]``.
"""

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.decoder import to_parameters
from jaxrl_llm.models.hf import read_config
from jaxrl_llm.models.weights import open_checkpoint, read_object, read_parameters
from jaxrl_llm.sharding import MeshShape, make_mesh


def read(directory, dtype="float32"):
    """(configuration, nested dict of arrays)."""
    model, _ = load_pretrained(directory, dtype)
    return model.config, to_parameters(model)


def counted(stored, reads):
    """The same tensors; the number of elements of every reading is added to ``reads``."""

    def count(tensor):
        def part(place):
            values = tensor.part(place)
            reads.append(values.size)
            return values

        return dataclasses.replace(tensor, part=part)

    return {name: count(tensor) for name, tensor in stored.items()}


def load_counted(directory, mesh, dtype="float32"):
    """(parameters on the mesh, elements of every reading)."""
    reads = []
    config = read_config(read_object(directory / "config.json"))
    return read_parameters(config, counted(open_checkpoint(directory), reads), dtype, mesh), reads


def example_of(directory):
    """Tokens, and the logits that transformers computed of them."""
    with np.load(directory / "example.npz") as stored:
        return dict(stored)


def write_safetensors(directory, tensors):
    """Write model.safetensors, of types too that safetensors' own functions for NumPy lack."""
    header, data = {}, b""
    names = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def anonymous():
    """Bytes of this process' memory now that are no pages of files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """The largest ``anonymous`` while it is entered, looked at every half millisecond."""

    def __init__(self):
        super().__init__()
        self.largest, self.running = 0, True

    def run(self):
        while self.running:
            self.largest = max(self.largest, anonymous())
            time.sleep(0.0005)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.running = False
        self.join()


def memory(directory, small):
    """Bytes of the arrays, and by how much the peak exceeded what was there before."""
    mesh = make_mesh(MeshShape())
    load_pretrained(small, "float32", mesh)  # brings in whatever takes memory only once
    before = anonymous()
    with Peak() as peak:
        model, _ = load_pretrained(directory, "float32", mesh)
    return {"arrays": sum(leaf.nbytes for leaf in jax.tree.leaves(model)), "peak": peak.largest - before}


def count(directory, rank, port):
    """Elements that one of two processes read, and how many there are."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    parameters, reads = load_counted(directory, make_mesh(MeshShape()))
    leaves = jax.tree.leaves(parameters)
    assert len(jax.devices()) == 8 and all(len(leaf.addressable_shards) == 4 for leaf in leaves)
    divided = [leaf for leaf in leaves if not leaf.sharding.is_fully_replicated]
    return {"read": sum(reads), "divided": sum(x.size for x in divided), "all": sum(x.size for x in leaves),
            "values": [float(shard.data.sum()) for leaf in divided for shard in leaf.addressable_shards]}  # fmt: skip


if __name__ == "__main__":
    mode, directory, *rest = sys.argv[1:]
    print(json.dumps((memory if mode == "memory" else count)(Path(directory), *rest)))
