"""Scores of programs by verl's and SkyRL-Gym's graders, for ``attack_sandbox.py``, in an environment that has them.

Reads programs by name as JSON, and prints the scores by grader and form as one line of JSON. The packages' own modules
are loaded without what their parents import, such as torch. One test, so that a cheat need not tell tests apart.
"""

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import types

MOST_S = 30


def without_parents(name):
    """Import a module with empty packages in place of its parents."""
    parts = name.split(".")
    folder = importlib.util.find_spec(parts[0]).submodule_search_locations[0]
    for depth in range(1, len(parts)):
        parent = types.ModuleType(".".join(parts[:depth]))
        parent.__path__ = [os.path.join(folder, *parts[1:depth])]
        sys.modules[parent.__name__] = parent
    return importlib.import_module(name)


def verl(program, called):
    """Return the score by verl's ``prime_code``, called as verl does."""
    tests = {"inputs": ["31"], "outputs": ["7345000961"]} | ({"fn_name": "f"} if called else {})
    grader = without_parents("verl.utils.reward_score.prime_code")
    return float(grader.compute_score(f"```python\n{program}\n```", tests, continuous=True)[0])


def skyrl(program, called):
    """Return the score by SkyRL-Gym's checker of LiveCodeBench."""
    kind = "functional" if called else "stdin"
    tests = [{"input": "31", "output": "7345000961", "testtype": kind, "metadata": {"func_name": "f"}}]
    grader = without_parents("skyrl_gym.envs.lcb.livecodebench")
    return float(grader.compute_score(f"```python\n{program}\n```", tests)[1])


def into(path, grader, program, called):
    """Write the score to a file, and nothing if the grader does not survive."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        given = grader(program, called)
    with open(path, "w") as file:
        file.write(str(given))


def score(grader, program, called):
    """Return the score that a process of its own gives; 0 if it gives none in time."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "score")
        process = multiprocessing.Process(target=into, args=(path, grader, program, called))
        process.start()
        process.join(MOST_S)
        if process.is_alive():
            process.kill()
        if not os.path.exists(path):
            return 0.0
        with open(path) as file:
            return float(file.read() or 0)


if __name__ == "__main__":
    programs = json.load(sys.stdin)
    found = {
        f"{grader.__name__}, {'called' if called else 'printed'}": {
            name: score(grader, program, called) for name, program in programs.items()
        }
        for grader in (verl, skyrl)
        for called in (False, True)
    }
    print(json.dumps(found))
