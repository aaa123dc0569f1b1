"""``jaxrl-llm generate``: one prompt and its answer, a prompt a line, or a chat."""

import dataclasses
import io
import sys

from jaxrl_llm import config as configs
from jaxrl_llm.cli.chat import chat
from jaxrl_llm.cli.flags import first, parse, status
from jaxrl_llm.cli.policy import load_policy
from jaxrl_llm.cli.speech import encode, say, wording
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import prepare_libraries
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.trained import find_run

USAGE = """usage: jaxrl-llm generate MODEL_OR_RUN [--prompt TEXT] [--max_new_tokens N] [--temperature T] [--top_p P]

Without --prompt it is a chat, on a terminal: each answer knows what was said before; Ctrl-C ends an answer, Ctrl-D the
chat, /new begins another. From a pipe or a file each line is a prompt by itself, and only the answers are written.
jaxrl-llm generate MODEL --help tells more."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer.

    Attributes:
      prompt: what to answer; None is a chat on a terminal, and elsewhere reads a prompt from each line of the
        standard input.
      max_new_tokens: longest answer, in tokens.
      temperature: 0 takes the most likely token each time.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      min_p: keep the tokens that are at least this share as likely as the most likely one; 0 keeps all.
      seed: another one gives another answer, unless the temperature is 0.
      system: the system message, in place of the run's own.
    """

    prompt: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    system: str | None = None


def generate(arguments: list[str]) -> int:
    """``generate MODEL_OR_RUN [--prompt TEXT] ...``; returns the exit code."""
    name = first(arguments, USAGE, 'generate needs a model or a run: jaxrl-llm generate smollm2-135m --prompt "Hello"')
    if name is None:
        return 0
    prepare_libraries()
    options = parse(Options, arguments, f"jaxrl-llm generate {name}", "Answer a prompt.")
    if options.prompt is not None and not options.prompt.strip():
        raise InputError("--prompt is empty: give it some text")
    configs.check_seed("--seed", options.seed)
    # Wrong numbers are refused here, before the model is loaded.
    sampling = Sampling(options.temperature, 0, options.top_p, options.max_new_tokens, min_p=options.min_p)
    run = find_run(name)
    status(f"loading {name}")
    policy = load_policy(name, run, writes=True)
    check_tokenizer(policy.tokenizer, name)
    status("")
    task = wording(policy, options.system)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are: ``encode`` refuses them
    if options.prompt is None and sys.stdin.isatty():
        chat(policy, task, sampling, options.seed)
        return 0
    lines = (line.strip() for line in sys.stdin) if options.prompt is None else [options.prompt]
    for prompt in filter(None, lines):
        say(policy, encode(policy, [{"role": "user", "content": prompt}], task), options.seed, sampling)
    return 0
