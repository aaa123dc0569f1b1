"""Readers of foreign input for ``fuzz.py``: what each reads, and how."""

import contextlib
import functools
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fuzz import Target
from fuzz_inputs import CODE, HARD, changed_bytes, json_text, text
from fuzz_models import (
    byte_tokenizer,
    import_all,
    make_adapter,
    make_directory,
    make_gguf,
    read_adapter_of,
    read_directory,
    read_gguf_file,
)

EXTRACTORS = ("last_number", "boxed", "whole", "tag:answer", "after:think", "after:####")
GYMS = (
    "chain_sum", "countdown", "simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24",
    "spiral_matrix", "string_insertion", "binary_matrix", "n_queens", "number_sorting", "propositional_logic",
    "basic_arithmetic", "bitwise_arithmetic", "codeio", "sudoku", "rush_hour", "word_ladder", "syllogism",
    "simple_equations", "decimal_arithmetic", "fraction_simplification", "tower_of_hanoi", "knights_knaves",
)  # fmt: skip
"""Data sets with verifiers of their own, among them all that evaluate the answer."""
POOLED_S = 5.0
"""Processor time of verifiers that run in workers, which are ended after ``scoring.timeout_s``."""


def _problem(answer: str, verifier: str, extractor: str, **metadata: Any) -> Any:
    from jaxrl_llm.types import Problem

    return Problem("1", ({"role": "user", "content": "?"},), answer, "task", extractor, verifier, metadata)


def _completion(said: str) -> Any:
    from jaxrl_llm.types import Completion

    none = np.zeros(0, np.int32)
    return Completion(none, np.zeros(0, np.float32), "stop", none > 0, none, text=said)


def extract_any(case: Any, folder: Path) -> Any:
    """Cut answers out of a text, in every way, and read them as numbers."""
    from jaxrl_llm.tasks.extract import EXTRACTORS as KNOWN
    from jaxrl_llm.tasks.extract import answer_of, extract, integer, number

    found = [extract(case, one) for one in EXTRACTORS if one in KNOWN or ":" in one]
    return found, [answer_of(case, one) for one in EXTRACTORS], number(case), integer(case)


def verify(case: Any, folder: Path) -> Any:
    """Compare an answer with a reference."""
    from jaxrl_llm.rewards.verify import accuracy

    said, answer, verifier, extractor = case
    found = accuracy(_problem(answer, verifier, extractor), _completion(said))
    assert 0 <= found <= 1, found
    return found


def verify_gym(case: Any, folder: Path) -> Any:
    """Score an answer by a data set of reasoning-gym."""
    from jaxrl_llm.rewards.verify import accuracy

    said, name, extractor = case
    metadata = {"generator": name, "options": {}, "entry": _entries()[name]}
    return accuracy(_problem("", "reasoning_gym", extractor, **metadata), _completion(said))


@functools.cache
def _entries() -> dict[str, Any]:
    import reasoning_gym

    return {name: reasoning_gym.create_dataset(name, size=1, seed=3)[0] for name in GYMS}


def _make_gym(draws: random.Random) -> Any:
    seeds = (*CODE, *HARD, *(str(entry["answer"]) for entry in _entries().values()))
    return text(draws, seeds), draws.choice(GYMS), draws.choice(EXTRACTORS[2:])


def parse_calls(case: Any, folder: Path) -> Any:
    """Read the tool calls of a reply."""
    from jaxrl_llm.environments.call_syntaxes import SYNTAXES
    from jaxrl_llm.environments.calls import HARMONY, NO_CALLS, parse_reply

    return [parse_reply(case, syntax) for syntax in (*SYNTAXES, HARMONY, NO_CALLS)]


ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": [{"role": "user", "content": "?"}], "answer": 3, "x": [1]}]
DATA_ROWS = {
    "Texts": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": True},
    "Pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5, "chat_template_kwargs": {"x": 1}},
    "Steps": {"prompt": "a", "completions": ["b", "c"], "labels": [True, 0.5]},
}


def _make_table(draws: random.Random) -> tuple[str, bytes]:
    suffix = draws.choice((".jsonl", ".json", ".csv", ".parquet"))
    if suffix == ".parquet":
        return suffix, changed_bytes(_parquet(), draws)
    if suffix == ".csv":
        return suffix, changed_bytes(b'prompt,answer\n"1 + 1 =",2\n"a ""b""",3\n', draws)
    changed = [json_text(row, draws) for row in ROWS]
    whole = "\n".join(changed) if suffix == ".jsonl" else f"[{', '.join(changed)}]"
    data = whole.encode("utf-8", "surrogatepass")
    return suffix, changed_bytes(data, draws) if draws.random() < 0.3 else data


@functools.cache
def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "answer": "1", "n": [1, 2]}] * 3), out)
    return out.getvalue()


def read_table(case: Any, folder: Path) -> Any:
    """Load a task from a table."""
    from jaxrl_llm.tasks import Table, Task, load

    suffix, data = case
    (folder / f"rows{suffix}").write_bytes(data)
    return load(Task(Table(f"rows{suffix}"), holdout=0.5))


def read_data(case: Any, folder: Path) -> Any:
    """Load rows of a supervised stage."""
    from jaxrl_llm.data import datasets
    from jaxrl_llm.data.loading import load_texts
    from jaxrl_llm.tasks import Table

    kind, template, data = case
    (folder / "rows.jsonl").write_bytes(data)
    given = getattr(datasets, kind)(Table("rows.jsonl"), template=template)
    return load_texts(given, byte_tokenizer(), (1,))


def _make_data(draws: random.Random) -> Any:
    kind = draws.choice(tuple(DATA_ROWS))
    lines = [json.dumps(DATA_ROWS[kind]), json_text(DATA_ROWS[kind], draws)]
    template = draws.choice(("plain", "chatml", "tokenizer"))
    return kind, template, "\n".join(lines).encode("utf-8", "surrogatepass")


TEMPLATES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
    "{{ messages[0].content | upper }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' * 9999999999 }}", "{{ [0] * 9999999999 }}", "{{ 9 ** 9 ** 9 ** 9 }}", "{{ '%9999999999d' | format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}", "{{ messages | map('format', 'x') | list }}", "{{ raise_exception('no') }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ strftime_now('%Y') }}", "{% include 'x' %}",
    "{{ lipsum(n=99999) }}", "{{ ('a' ~ 'b') | center(9999999999) }}", "{{ range(10**9) | list }}",
    "{{ namespace.__init__.__globals__ }}", "{{ messages.append(1) }}", "{{ ''.join(messages) }}", "{% break %}",
)  # fmt: skip


def render(case: Any, folder: Path) -> Any:
    """Render chats by a template of a stranger's tokenizer."""
    from jaxrl_llm.tasks import Task
    from jaxrl_llm.tasks.template import encode

    task = Task([], template=case if "{" in case else f"{case}{{#}}", date="2025-07-01", system="Be brief.")
    return encode(_problem("", "match", "whole"), task, byte_tokenizer())


@functools.cache
def _runs() -> tuple[dict[str, Any], ...]:
    from jaxrl_llm import config as configs

    names = ("smoke", "ppo_quickstart", "calculator_quickstart", "mixture_smollm2", "dpo_quickstart", "prorl_v2_cycles")
    runs = [configs.to_json(configs.load_config(name)[1]) for name in names]
    own = {"origin": {"folder": "/nowhere", "config": None, "modules": {"evil": "evil.py"}, "models": {}}}
    return tuple(run | own | {"chosen": [], "from": {"run": "x", "step": 1}} for run in runs)


def _make_run(draws: random.Random) -> str:
    whole = json.loads(json.dumps(draws.choice(_runs())))
    if "recipe" in whole and draws.random() < 0.3:
        whole["recipe"]["shaping"] = [{"type": "evil:Shaping"}]
    return json_text(whole, draws)


def read_run(case: Any, folder: Path) -> Any:
    """Read a stranger's run as ``generate`` and as ``eval`` do, and check its settings."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.errors import InputError
    from jaxrl_llm.runs.load import find_run

    (folder / "evil.py").write_text("open('fuzzed_mark', 'w')")
    run = folder / "run"
    (run / "checkpoints" / "1" / "host").mkdir(parents=True)
    (run / "checkpoints" / "1" / "host" / "metadata").write_text("{}")
    (run / "config.json").write_bytes(case.encode("utf-8", "surrogatepass"))
    for tests in (False, True):
        with contextlib.suppress(InputError):
            find_run(str(run), tests)
    found = configs.find_config(str(run))
    settings = configs.resolved(found.run)
    configs.validate(settings)
    return configs.to_json(settings)


def write_report_of(case: Any, folder: Path) -> Any:
    """Write the report of a stranger's run."""
    from jaxrl_llm.telemetry.report import page

    for name, data in zip(("metrics.jsonl", "samples.jsonl", "config.json"), case, strict=True):
        (folder / name).write_bytes(data)
    found = page([folder])
    assert found.count("<script") == 1 + found.count('type="application/octet-stream"'), "a script too many"


def _make_report(draws: random.Random) -> tuple[bytes, ...]:
    row = {"step": 1, "reward/mean": 0.5, "loss": 1.0, "event/resumed": True, "time/step_s": 1.0, "kl": None}
    sample = {"step": 1, "kind": "training", "prompt": "a", "completion": "</script>", "reward": 1.0, "turns": []}
    rows = "\n".join([json.dumps(row), *(json_text(row, draws) for _ in range(2)), json.dumps(row)])
    samples = "\n".join([json.dumps(sample), json_text(sample, draws)])
    return tuple(each.encode("utf-8", "surrogatepass") for each in (rows, samples, json_text(_runs()[0], draws)))


def read_checkpoint(case: Any, folder: Path) -> Any:
    """Look at a stranger's checkpoint: its steps, phases, checksums and host state."""
    from jaxrl_llm import codec
    from jaxrl_llm.checkpoints.integrity import fault
    from jaxrl_llm.checkpoints.snapshots import kept, listed, phase_of
    from jaxrl_llm.checkpoints.store import read_host
    from jaxrl_llm.rewards.scorer import RECORDS

    host, sums, step = case
    place = folder / "checkpoints" / step
    (place / "host").mkdir(parents=True)
    (place / "host" / "metadata").write_bytes(host)
    (place / "checksums.json").write_bytes(sums)
    for found in kept(folder).values():
        phase_of(found)
        fault(found)
        with contextlib.suppress(ValueError):
            codec.from_json(read_host(found), RECORDS)
    return listed(folder)


HOST = {
    "phase": 1, "rules": {"a": {"n": 1}}, "x": {"$tuple": [1, {"$date": "2025-07-01"}]}, "y": {"$set": [1, 2]},
    "z": {"$array": {"dtype": "float32", "shape": [2], "data": "c-mu~00000"}}, "t": {"$timestamp": [1, "UTC"]},
    "b": {"$bytes": "YWE="}, "d": {"$decimal": "1.5"}, "c": {"$datetime": ["2025-07-01T00:00:00", "Europe/Paris", 0]},
}  # fmt: skip


def _make_checkpoint(draws: random.Random) -> tuple[bytes, bytes, str]:
    sums = {"host/metadata": [3, 4], "state/d/x": [8, 1]}
    texts = (json_text(HOST, draws), json_text(sums, draws))
    return (
        *(one.encode("utf-8", "surrogatepass") for one in texts),
        draws.choice(("1", "10", "٣", "²", "0", "9" * 30)),
    )


FLAGS = """
    --steps --model --seed --rollout.group --learner.optimiser.learning_rate --task.holdout --recipe --run_dir --from
    --task.source.options --rollout.temperature --mesh.fsdp --rules.guards --output.trackers --quiet --carry --json
    --task.extractor --recipe.algorithm.surrogate.low --scoring.rewards --loss_type --beta actor.kl=1 --guard --trust
    --learner.lora.rank --task.source.size --rollout.engine.slots --task.tools --x --distributed.processes --help --out
    --samples --prompt
""".split()


def _make_flags(draws: random.Random) -> list[str]:
    command = draws.choice(("train", "train", "train", "eval", "report", "export", "generate", "list", "reset", "x"))
    name = draws.choice(("smoke", "smoke", "quickstart", "none.py", text(draws)[:60]))
    values = ("1", "-1", "0", "1e400", "nan", "", "true", "x", "9" * 400, "(1,2)", "{}", "[]", "\ud800", "a\nb", "*")
    rest = [
        draws.choice((draws.choice(FLAGS), draws.choice(values), f"{draws.choice(FLAGS)}={draws.choice(values)}"))
        for _ in range(draws.randint(0, 4))
    ]
    return [command, name, *rest, "--no_such_flag"]  # nothing is trained


def run_command(case: Any, folder: Path) -> Any:
    """Run a command with wrong flags: it is refused in a line, or has nothing to do."""
    from jaxrl_llm.cli import run

    with open(folder / "out", "w", errors="backslashreplace") as out:
        old, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), out, out
        try:
            code = run(case)
        except SystemExit as stop:
            code = stop.code
        finally:
            sys.stdout, sys.stderr = old
    said = (folder / "out").read_text(errors="replace")
    assert code in (0, 2), code
    assert "Traceback" not in said and (code == 0 or said.count("\n") <= 2), said[:300]


def _imports(*names: str) -> Any:
    def prepare() -> None:
        for name in names:
            __import__(name)

    return prepare


def _ready(*calls: Any) -> Any:
    def prepare() -> None:
        for call in calls:
            call()

    return prepare


def _verifiers(draws: random.Random) -> Any:
    answer = draws.choice(("42", "x^2", "\\frac{1}{2}", text(draws, HARD)))
    return text(draws, (*CODE, *HARD)), answer, draws.choice(("match", "integer", "math")), draws.choice(EXTRACTORS)


TARGETS = {
    "extractors": Target(lambda draws: text(draws, HARD), extract_any),
    "verifiers": Target(
        _verifiers, verify, _imports("jaxrl_llm.rewards.verify", "jaxrl_llm.rewards.math_answer"), POOLED_S
    ),
    "gym": Target(_make_gym, verify_gym, _ready(_entries, _imports("jaxrl_llm.rewards.gym_answer")), POOLED_S),
    "calls": Target(lambda draws: text(draws, HARD), parse_calls, _imports("jaxrl_llm.environments.calls")),
    "tables": Target(_make_table, read_table, _ready(_parquet, _imports("jaxrl_llm.tasks"))),
    "data": Target(_make_data, read_data, _ready(byte_tokenizer, _imports("jaxrl_llm.data.loading"))),
    "templates": Target(lambda draws: text(draws, TEMPLATES) or "{{", render, byte_tokenizer),
    "models": Target(make_directory, read_directory, import_all),
    "gguf": Target(make_gguf, read_gguf_file, import_all),
    "adapters": Target(make_adapter, read_adapter_of, import_all),
    "runs": Target(_make_run, read_run, _runs),
    "reports": Target(_make_report, write_report_of, _ready(_runs, _imports("jaxrl_llm.telemetry.report"))),
    "checkpoints": Target(
        _make_checkpoint, read_checkpoint, _imports("jaxrl_llm.checkpoints.store", "jaxrl_llm.rewards.scorer", "pandas")
    ),
    "flags": Target(_make_flags, run_command, _ready(_runs, _imports("jaxrl_llm.cli.train", "tyro"))),
}
"""All readers, by name."""
