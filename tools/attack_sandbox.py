"""Attack the sandbox and cheat its tests, at each level of protection that this system allows.

    python tools/attack_sandbox.py [--minutes 1] [--peers]

Runs every program of ``attack_programs.py`` alone, then for some minutes programs drawn at random, as many at one time
as there are processors, between honest ones; afterwards nothing may be left: no process, no file, no thread. Prints a
table, and the number of verdicts a second. With ``--peers`` the graders of verl and SkyRL-Gym are installed into an
environment of their own, and the cheats are graded by them too. Exit code 1 if anything was reached, any cheat was
paid here, or an honest program was judged wrong.
"""

import collections
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro
from attack_programs import BOMBS, CHEATS, EXPRESSIONS, HONEST, LASTING, TESTS, attempt, cheat

from jaxrl_llm.rewards import code, sandbox
from jaxrl_llm.sandbox.client import SandboxError, Servers

PACKAGES = ("verl==0.9.1", "skyrl-gym==0.4.0")
REQUIREMENTS = ("numpy", "pandas")
"""What those two files of the packages import; the packages themselves need torch, which grading does not."""
ROOT = Path(__file__).parents[1]
GRADED = ROOT / "tools" / "attack_peers.py"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the attack.

    Attributes:
      minutes: of programs drawn at random, for each level.
      peers: also grade the cheats with verl's and SkyRL-Gym's graders, which are installed from PyPI.
    """

    minutes: float = 0.5
    peers: bool = False


def main(options: Options) -> int:
    """Attack, print what was found, and return the exit code."""
    faults = []
    for level in sandbox.LEVELS[1:]:
        servers = Servers(level)
        if servers.level != level:
            print(f"{level}: not on this system, which reaches {servers.level}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            secret = Path(folder) / "secret"
            secret.write_text("secret")
            names = {"secret": secret, "parent": os.getpid(), "project": ROOT, "name": f"left-{os.getpid()}"}
            names |= {"tcp": 9, "udp": 9, "unix": f"{folder}/unix", "datagrams": f"{folder}/datagrams"}
            hostile = {name: attempt(text, names) for name, text in EXPRESSIONS.items()} | BOMBS | LASTING
            faults += alone(level, servers, hostile)
            faults += together(level, servers, hostile, 60 * options.minutes)
        servers.close()
        left = remains()
        faults += [f"{level}: {left} is left"] if left else []
    faults += cheats(options.peers)
    for count in (1, 10):
        print(f"verdicts a second with {count} tests each: {speed(count):.0f}")
    print("\n".join(faults) or "nothing was reached")
    return bool(faults)


def alone(level: str, servers: Servers, programs: dict[str, str]) -> list[str]:
    """Run each program, count how they ended, and return what was reached."""
    faults, ends = [], collections.Counter()
    for name, program in programs.items():
        found = sandbox.outcome(servers.run({"code": program}, b"", 1.0, 256))
        ends["stopped" if "stopped" in found.stdout else found.status] += 1
        faults += [f"{level}: {name}"] if "BREACH" in found.stdout else []
    print(f"{level}: {len(programs)} programs: {dict(ends)}")
    return faults


def together(level: str, servers: Servers, programs: dict[str, str], seconds: float) -> list[str]:
    """Run programs at random, and honest ones between them; return what went wrong."""
    until, faults, runs = time.monotonic() + seconds, [], 0

    def worker(seed: int) -> tuple[int, list[str]]:
        draw, count, wrong = random.Random(seed), 0, []
        while time.monotonic() < until:
            name = draw.choice(list(programs))
            try:
                found = sandbox.outcome(servers.run({"code": programs[name]}, b"", 0.2, 128))
            except SandboxError:  # too busy to tell
                continue
            honest = sandbox.outcome(servers.run({"code": "print(input())"}, b"honest", 5.0, 128))
            wrong += [f"{level}: {name}"] * ("BREACH" in found.stdout)
            wrong += [f"{level}: after {name} an honest program ended with {honest}"] * (honest.stdout != "honest\n")
            count += 2
        return count, wrong

    with ThreadPoolExecutor() as pool:
        for count, wrong in pool.map(worker, range(os.cpu_count() or 1)):
            runs, faults = runs + count, faults + wrong
    print(f"{level}: {runs} programs at random in {seconds:.0f} s")
    return faults


def remains() -> str:
    """Return a process or folder that is left of the sandbox; empty if there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"jaxrl_llm.sandbox.server" in command and int(state[1]) == os.getpid():
            return f"process {process.name}"
    return ""


def cheats(peers: bool) -> list[str]:
    """Grade the cheats, print who pays how many, and return those that were paid here."""
    programs = {"(honest)": HONEST} | {name: cheat(body) for name, body in CHEATS.items()}
    ours = {
        f"{kind} (here)": {name: code.grade(program, tests).score for name, program in programs.items()}
        for kind, tests in TESTS.items()
    }
    found = ours | (graded_by_peers(programs) if peers else {})
    for kind, scores in found.items():
        paid = [name for name, score in scores.items() if score and name != "(honest)"]
        print(f"{kind}: honest {scores['(honest)']}, {len(paid)} of {len(CHEATS)} cheats paid: {', '.join(paid)}")
    return [f"{kind}: {n}" for kind, scores in ours.items() for n, s in scores.items() if s != (n == "(honest)")]


def graded_by_peers(programs: dict[str, str]) -> dict[str, dict[str, float]]:
    """Install the peers' graders, and return their scores of the programs by grader and form."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
        given = json.dumps(programs)
        command = [python, str(GRADED)]
        # A grader that is ended by a program says so at length.
        said = subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def speed(count: int) -> float:
    """Return verdicts a second on programs that print at once, with this number of tests each."""
    tests = {"inputs": ["1 2"] * count, "outputs": ["3"] * count}
    program = "print(sum(map(int, input().split())))"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda _: code.grade(program, tests), range(4)))
        began = time.monotonic()
        verdicts = list(pool.map(lambda _: code.grade(program, tests), range(200)))
    assert all(one.score == 1 for one in verdicts)
    return len(verdicts) / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
