"""Benchmarks of this project: ``python -m bench WHAT [...]``, and ``--help`` for its options.

    python -m bench rollout --model 20m --lengths long

``rollout``, ``update``, ``loss`` and ``sampling`` measure programs on this machine's default device; ``episodes``,
``scoring``, ``replay`` and ``verdicts`` whole steps of the trainer, and the sandbox; ``peers`` compares with other
libraries, each in a virtual environment of its own, and ``losses`` compares their losses. Each prints JSON lines;
docs/benchmarks.md reports them.
"""

import json
import sys

import tyro

from jaxrl_llm.errors import InputError


def main() -> None:
    """Run the command line."""
    from bench import losses, peers, speed, worlds

    kinds = {
        "rollout": (speed.Rollout, speed.rollout),
        "update": (speed.Update, speed.update),
        "loss": (speed.Loss, speed.loss),
        "sampling": (speed.Draws, speed.sampling),
        "episodes": (worlds.Episodes, worlds.episodes),
        "scoring": (worlds.Scored, worlds.scoring),
        "replay": (worlds.Replayed, worlds.replay),
        "verdicts": (worlds.Verdicts, worlds.verdicts),
        "peers": (peers.Comparison, peers.compare),
        "losses": (losses.Options, losses.compare),
    }
    what = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if what not in kinds:
        print(__doc__)
        sys.exit(what not in ("-h", "--help") and f"bench: no benchmark {what!r}: there are {', '.join(kinds)}")
    options, run = kinds[what]
    asked = tyro.cli(options, prog=f"python -m bench {what}", description=run.__doc__, args=sys.argv[2:])
    try:
        for row in run(asked):
            print(json.dumps(row), flush=True)
    except InputError as error:
        sys.exit(f"bench {what}: {error}")


if __name__ == "__main__":
    main()
