"""The contestants of compare_peers: what each is made of, and its process."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parents[1]
TUNIX = ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "transformers==5.12.1")
TRL = ("trl==1.16.0", "transformers==5.23.0", "torch==2.13.0", "accelerate==1.15.0", "datasets==5.2.0")


class Peer(NamedTuple):
    """A contestant: its script, the script's mode, and what its environment is made of; none for our own."""

    script: str
    mode: str = ""
    pins: tuple[str, ...] = ()


PEERS = {
    "ours": Peer("run_ours.py"),
    "tunix": Peer("run_tunix.py", pins=TUNIX),
    "trl": Peer("run_trl.py", "generate", TRL),
    "batching": Peer("run_trl.py", "batching", TRL),
}


def python_of(pins: tuple[str, ...], folder: Path) -> Path:
    """The interpreter of an environment that holds the pins; made on the first call, remade when a pin changes."""
    if not pins:
        return Path(sys.executable)
    home = folder / hashlib.sha256("\n".join(pins).encode()).hexdigest()[:12]
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (home / "complete").is_file():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True, stdout=sys.stderr)
        (home / "complete").write_text("\n".join(pins))
    return python


@dataclasses.dataclass
class Worker:
    """A contestant's process, which waits for lines of JSON."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer; SystemExit with the end of its log where none comes."""
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.flush()
            tail = "\n".join(Path(self.log.name).read_text().splitlines()[-15:])
            raise SystemExit(f"compare_peers: {self.name} ended without an answer; the end of {self.log.name}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def started(name: str, folder: Path) -> Worker:
    """The contestant's process, which keeps what it compiles from run to run."""
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder.absolute() / "compiled"))
    process, log = process_of(name, PEERS[name].script, folder, compiled)
    return Worker(name, process, log)


def process_of(name: str, script: str, folder: Path, compiled: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """A contestant's process, and the log of what its libraries say.

    Threads that wait sleep: spinning ones would take the cores from others.

    Args:
      name: whose environment it runs in.
      script: in tools/peers.
      folder: where environments and logs are kept.
      compiled: folder for compiled programs.
    """
    peer = PEERS[name]
    python = python_of(peer.pins, folder.absolute())
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment["JAX_COMPILATION_CACHE_DIR"] = compiled
    # A peer sees none of the packages of this environment.
    environment["PYTHONPATH"] = "" if peer.pins else os.pathsep.join((str(ROOT), str(ROOT / "tools")))
    log = open(folder / f"{name}.log", "w")  # noqa: SIM115  its owner closes it with the process
    command = [str(python), str(ROOT / "tools" / "peers" / script)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment), log
