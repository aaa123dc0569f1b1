"""Readers of foreign input: what each is given, and how it reads it as the package does. Imports lie inside, since a
process that reads has to import everything before its limits hold.
"""

import contextlib
import dataclasses
import functools
import io
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from campaigns.hostile import CODE, HARD, changed_bytes, json_text, text

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
SECONDS = 2.0
"""Processor time of one input."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader of foreign input.

    Attributes:
      make: draws an input.
      read: reads one in a folder, which is empty before.
      prepare: called once, before the limits hold: imports, and what every input needs.
      seconds: of processor time for one input.
    """

    make: Callable[[random.Random], Any]
    read: Callable[[Any, Path], Any]
    prepare: Callable[[], Any] = lambda: None
    seconds: float = SECONDS


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
    from jaxrl_llm.tasks.extract import answer_of, extract, integer, parse_number

    found = [extract(case, one) for one in EXTRACTORS if one in KNOWN or ":" in one]
    return found, [answer_of(case, one) for one in EXTRACTORS], parse_number(case), integer(case)


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
    from jaxrl_llm.environments.calls import HARMONY, NO_CALLS, SYNTAXES, parse_reply

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
    from jaxrl_llm.data.datasets import load_texts
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
    from jaxrl_llm.tasks import Task, encode

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
    from jaxrl_llm.runs import find_run

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
    from jaxrl_llm.telemetry.report import render_page

    for name, data in zip(("metrics.jsonl", "samples.jsonl", "config.json"), case, strict=True):
        (folder / name).write_bytes(data)
    found = render_page([folder])
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
    from jaxrl_llm.checkpoints.snapshots import kept, listed, phase_of
    from jaxrl_llm.checkpoints.step_files import fault
    from jaxrl_llm.checkpoints.store import read_host
    from jaxrl_llm.rewards.scorer import SCORE_RECORDS

    host, sums, step = case
    place = folder / "checkpoints" / step
    (place / "host").mkdir(parents=True)
    (place / "host" / "metadata").write_bytes(host)
    (place / "checksums.json").write_bytes(sums)
    for found in kept(folder).values():
        phase_of(found)
        fault(found)
        with contextlib.suppress(ValueError):
            codec.from_json(read_host(found), SCORE_RECORDS)
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


@functools.cache
def byte_tokenizer() -> Any:
    """Return a tokenizer of bytes with a small chat template."""
    from jaxrl_llm.models.pretrained import BUILTIN  # noqa: F401  imports what the tokenizer needs
    from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer, byte_alphabet

    tokens = (*byte_alphabet(), "<eos>")
    named = (("eos_token", "<eos>"), ("pad_token", "<eos>"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return build_tokenizer(BytePairs(tokens, (), ("<eos>",), chat_template=template, names=named))


def _files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((MODELS / folder).iterdir()) if path.suffix != ".npz"}


def make_directory(draws: random.Random) -> dict[str, bytes]:
    """Return the files of a model, of which one or two are changed."""
    files = dict(_files(draws.choice(("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2"))))
    files |= dict(_tokenizer_files())
    for name in draws.sample(sorted(files), draws.randint(1, 2)):
        if name.endswith(".json") and draws.random() < 0.8:
            files[name] = json_text(json.loads(files[name]), draws).encode("utf-8", "surrogatepass")
        else:
            files[name] = changed_bytes(files[name], draws, 4000)
    return files


@functools.cache
def _tokenizer_files() -> tuple[tuple[str, bytes], ...]:
    from jaxrl_llm.models.tokenizer import save_tokenizer

    with tempfile.TemporaryDirectory() as place:
        save_tokenizer(byte_tokenizer(), Path(place))
        return tuple((path.name, path.read_bytes()) for path in Path(place).iterdir())


def read_directory(case: Any, folder: Path) -> Any:
    """Read a Hugging Face directory: attributes, tokenizer, each tensor."""
    from jaxrl_llm.models.families import tensors_of
    from jaxrl_llm.models.hf import is_reward_model, read_config, with_special_ids
    from jaxrl_llm.models.pretrained import check_name
    from jaxrl_llm.models.tokenizer import load_tokenizer
    from jaxrl_llm.models.weights import check_tensors, open_checkpoint, read_object, read_part, split_tensors
    from jaxrl_llm.models.weights import our_shape as shape_of

    for name, data in case.items():
        (folder / name).write_bytes(data)
    check_name(str(folder))
    attributes = read_object(folder / "config.json")
    config = read_config(attributes)
    generation = folder / "generation_config.json"
    tokenizer = load_tokenizer(folder)
    config = with_special_ids(config, read_object(generation) if generation.is_file() else {}, tokenizer)
    scalar = is_reward_model(attributes)
    stored = split_tensors(config, open_checkpoint(folder))
    check_tensors(config, stored, scalar)
    for tensor in tensors_of(config, scalar):
        place = tuple(slice(0, size) for size in shape_of(tensor, config))
        read_part(config, tensor, stored, np.dtype("float32"), place)
    if tokenizer is not None:
        tokenizer("some text")


def read_gguf_file(case: Any, folder: Path) -> Any:
    """Read a GGUF file: attributes, tokenizer, each tensor."""
    from jaxrl_llm.models.gguf import _as_input_error, read_gguf
    from jaxrl_llm.models.hf import read_config, with_special_ids
    from jaxrl_llm.models.weights import check_tensors

    path = folder / "model.gguf"
    path.write_bytes(case)
    attributes, stored, tokenizer = read_gguf(path)
    with _as_input_error(path):
        config = with_special_ids(read_config(attributes), {}, tokenizer)
        check_tensors(config, stored)
        for tensor in stored.values():
            tensor.read()


def make_gguf(draws: random.Random) -> bytes:
    """Return a GGUF file with changes in its head."""
    return changed_bytes((MODELS / f"{draws.choice(('llama', 'qwen2', 'gemma2'))}.gguf").read_bytes(), draws, 6000)


ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "llama",
    "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "task_type": "CAUSAL_LM",
}  # fmt: skip


def read_adapter_of(case: Any, folder: Path) -> Any:
    """Read a PEFT adapter."""
    from jaxrl_llm.models.peft import base_model_name, read_adapter

    (folder / "adapter_config.json").write_bytes(case[0])
    (folder / "adapter_model.safetensors").write_bytes(case[1])
    base_model_name(folder)
    return read_adapter(folder, _llama())


@functools.cache
def _llama() -> Any:
    from jaxrl_llm.models.pretrained import model_config_of

    return model_config_of(str(MODELS / "llama"))[0]


def make_adapter(draws: random.Random) -> tuple[bytes, bytes]:
    """Return the two files of an adapter, changed or not."""
    described = json_text(ADAPTER, draws) if draws.random() < 0.6 else json.dumps(ADAPTER)
    weights = changed_bytes(_factors(), draws, 3000) if draws.random() < 0.6 else _factors()
    return described.encode("utf-8", "surrogatepass"), weights


@functools.cache
def _factors() -> bytes:
    from safetensors.numpy import save

    config = _llama()
    inner = config.attention.heads * config.attention.head_dim
    at = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, config.width), "B": (inner, 2)}
    return save(
        {at.format(i, k): np.zeros(shape, np.float32) for i in range(config.layers) for k, shape in shapes.items()}
    )


def import_all() -> None:
    """Import what reading models needs, before the limits hold."""
    import gguf  # noqa: F401
    import jax  # noqa: F401
    import safetensors  # noqa: F401
    import transformers  # noqa: F401

    byte_tokenizer()
    _tokenizer_files()
    read_directory(_files("llama") | dict(_tokenizer_files()), _scratch())
    read_gguf_file((MODELS / "llama.gguf").read_bytes(), _scratch())
    _llama()


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz"))


def _ready(*needed: Any) -> Any:
    """Return what imports modules, by name, and calls functions."""

    def prepare() -> None:
        for one in needed:
            __import__(one) if isinstance(one, str) else one()

    return prepare


def _verifiers(draws: random.Random) -> Any:
    answer = draws.choice(("42", "x^2", "\\frac{1}{2}", text(draws, HARD)))
    return text(draws, (*CODE, *HARD)), answer, draws.choice(("match", "integer", "math")), draws.choice(EXTRACTORS)


TARGETS = {
    "extractors": Target(lambda draws: text(draws, HARD), extract_any),
    "verifiers": Target(
        _verifiers, verify, _ready("jaxrl_llm.rewards.verify", "jaxrl_llm.rewards.math_answer"), POOLED_S
    ),
    "gym": Target(_make_gym, verify_gym, _ready(_entries, "jaxrl_llm.rewards.gym_answer"), POOLED_S),
    "calls": Target(lambda draws: text(draws, HARD), parse_calls, _ready("jaxrl_llm.environments.calls")),
    "tables": Target(_make_table, read_table, _ready(_parquet, "jaxrl_llm.tasks")),
    "data": Target(_make_data, read_data, _ready(byte_tokenizer, "jaxrl_llm.data.datasets")),
    "templates": Target(lambda draws: text(draws, TEMPLATES) or "{{", render, byte_tokenizer),
    "models": Target(make_directory, read_directory, import_all),
    "gguf": Target(make_gguf, read_gguf_file, import_all),
    "adapters": Target(make_adapter, read_adapter_of, import_all),
    "runs": Target(_make_run, read_run, _runs),
    "reports": Target(_make_report, write_report_of, _ready(_runs, "jaxrl_llm.telemetry.report")),
    "checkpoints": Target(
        _make_checkpoint, read_checkpoint, _ready("jaxrl_llm.checkpoints.store", "jaxrl_llm.rewards.scorer", "pandas")
    ),
    "flags": Target(_make_flags, run_command, _ready(_runs, "jaxrl_llm.cli.train", "tyro")),
}
"""All readers, by name."""
