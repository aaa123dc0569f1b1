"""usage: jaxrl-llm generate MODEL_OR_RUN [--prompt TEXT] [--max_new_tokens N] [--temperature T] [--top_p P]
                                             [--tools MODULE:FUNCTION ...]

Without --prompt it is a chat, on a terminal: each answer follows the conversation so far; Ctrl-C ends an answer, Ctrl-D
the chat, /new starts another. From a pipe or a file each line is a prompt by itself, and only the answers are written.
Calls of tools are run, and the model reads their results, until it answers without a call.
jaxrl-llm generate MODEL --help shows more.
"""

import contextlib
import dataclasses
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy, check_tools, load_policy
from jaxrl_llm.cli.flags import first, parse_flags, status
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.environments.environment import Environment, Limits
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.world import World
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.runs import find_run
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.system.setting import check_fields
from jaxrl_llm.system.signals import answering, on_exit, quit_now
from jaxrl_llm.tasks import Rows, Task
from jaxrl_llm.tasks import encode as encode_problem
from jaxrl_llm.tasks.tables import unwritable
from jaxrl_llm.tasks.task import InMemory
from jaxrl_llm.tasks.template import check_tokenizer, template_text, word_prompt
from jaxrl_llm.types import Completion, Message, Problem

PROMPT = "> "
GREETING = "a chat: type a message and press Enter; /help shows more, Ctrl-D ends"
FORGOTTEN = "a new chat: the conversation is forgotten"
HELP = """/new (or /clear)   forget the conversation and start again
/bye (or /exit)    end; so does Ctrl-D
/help              these lines
Ctrl-C ends an answer before its end; pressed again, or where no answer is being given, it ends the program."""


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The prompt and how to sample the answer.

    Attributes:
      prompt: the prompt; None is a chat on a terminal, and elsewhere reads a prompt from each line of stdin.
      max_new_tokens: longest answer, in tokens.
      temperature: 0 takes the most likely token each time.
      top_p: keep the smallest set of most likely tokens with at least this total probability; 1 keeps all.
      min_p: keep the tokens that are at least this share as likely as the most likely one; 0 keeps all.
      seed: another one gives another answer, unless the temperature is 0.
      system: the system message, in place of the run's own.
      tools: functions that the model may call, each as module:function, in place of the run's own.
      mesh: over the devices of this machine; see ``MeshShape``.
    """

    prompt: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Annotated[int, configs.SEED] = 0
    system: str | None = None
    tools: tuple[str, ...] = ()
    mesh: MeshShape = MeshShape()


def generate_command(arguments: list[str]) -> int:
    """Run ``generate MODEL_OR_RUN [--prompt TEXT] ...``; return the exit code."""
    name = first(
        arguments, __doc__, 'generate needs a model or a run: jaxrl-llm generate smollm2-135m --prompt "Hello"'
    )
    options = parse_flags(GenerateOptions, arguments, f"jaxrl-llm generate {name}", "Answer a prompt.")
    require(options.prompt is None or options.prompt.strip(), "--prompt is empty: give it some text")
    check_fields(options, "--")
    sampling = Sampling(options.temperature, 0, options.top_p, options.max_new_tokens, min_p=options.min_p)
    Factory(None, options.tools)
    run = find_run(name)
    if run is not None and not options.tools:
        check_tools(name, run)
    status(f"loading {name}")
    policy = load_policy(name, run, options.mesh)
    check_tokenizer(policy.tokenizer, name)
    status("")
    task = prompt_wording(policy, options.system, options.tools)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are: ``encode_chat`` refuses them
    if options.prompt is None and sys.stdin.isatty():
        chat(policy, task, sampling, options.seed)
        return 0
    lines = (line.strip() for line in sys.stdin) if options.prompt is None else [options.prompt]
    for prompt in filter(None, lines):
        messages = [{"role": "user", "content": prompt}]
        answer_chat(policy, messages, task, lambda ids: print_answer(policy, ids, options.seed, sampling))
    return 0


def prompt_wording(policy: Policy, system: str | None, tools: tuple[str, ...] = ()) -> Task:
    """Return the wording of prompts: that of the run's training, else the tokenizer's chat template, else plain text.
    ``system``: the system message; ``tools``: functions that the model may call; both in place of the run's own.
    """
    template = "tokenizer" if policy.tokenizer.chat_template else "plain"
    task = configs.wording(policy.run) or Task(Rows(InMemory(())), template=template)
    system, tools = task.system if system is None else system, tools or task.tools
    template = task.template
    if tools and template == "tokenizer":  # one that writes the same marks, and no tools: they are text
        text = template_text(task, policy.tokenizer)
        template = "chatml" if "<|im_start|>" in text and "tools" not in text else template
    return dataclasses.replace(task, template=template, system=system, tools=tools, environment=None)


def encode_chat(policy: Policy, messages: Sequence[Message], task: Task) -> Any:
    """Return the token ids of a chat up to the beginning of the answer, int32[T]."""
    invalid = unwritable([task.system, task.suffix, *(message["content"] for message in messages)])
    require(not invalid, f"the prompt or the system message holds {invalid!a}, which is not UTF-8: write it in UTF-8")
    if task.tools:
        return tool_episode(policy, task)[0].prompt(messages)
    return encode_problem(Problem("prompt", tuple(messages), "", "prompt"), task, policy.tokenizer)


def tool_episode(policy: Policy, task: Task) -> tuple[EpisodeFormat, World]:
    """Return the form of a chat with the task's tools, and the world that runs their calls."""
    functions = Factory(None, task.tools).functions
    world = World(Environment(), {}, 0, Limits(), functions)
    world.reset(())
    return EpisodeFormat(policy.tokenizer, task, world.tools, policy.model.config.tokens.eos), world


def answer_chat(
    policy: Policy, messages: Sequence[Message], task: Task, speak: Callable[[Any], Completion]
) -> tuple[list[Any], Completion]:
    """Let the model answer a chat, and run the calls in its answers, until one calls nothing or is cut off; results are
    shown on stderr. Return all that was said, and the last answer. ``speak`` answers a prompt, as ``print_answer``.
    """
    completion = speak(encode_chat(policy, messages, task))
    if not task.tools:
        return [{"role": "assistant", "content": completion.text}] if len(completion.tokens) else [], completion
    form, world = tool_episode(policy, task)
    replies: list[Any] = []
    while len(completion.tokens):
        replies.append((reply := form.parse(completion.tokens.tolist())).message)
        if completion.finish_reason != "stop":
            break
        answer = world.reply(reply)
        replies += answer.messages
        for message in answer.messages:
            print_note(printable(f"{message.get('name', message['role'])}: {message['content']}"))
        if answer.end:
            break
        completion = speak(encode_chat(policy, [*messages, *replies], task))
    world.close()
    return replies, completion


def print_answer(
    policy: Policy, prompt: Any, seed: int, sampling: Sampling, stopped: Callable[[], bool] = lambda: False
) -> Completion:
    """Print an answer to a prompt (token ids) on stdout: on a terminal while it is sampled, elsewhere at its end.
    ``stopped`` is called after each chunk; the answer ends when it returns True.
    """
    from jaxrl_llm.engine.engine import backend_for
    from jaxrl_llm.rollout.generation import OpenRequests, generate_stream

    screen = sys.stdout.isatty()
    printed = 0

    def tell(text: str) -> None:
        nonlocal printed
        if len(text) > printed:
            if not printed:
                status("")
            print(printable(text[printed:]) if screen else text[printed:], end="", flush=True)
            printed = len(text)

    status("thinking")
    config = policy.model.config
    longest = config.attention.rope.max_positions
    room = longest - len(prompt)
    require(room > 0, f"the prompt has {len(prompt)} tokens, and the model was made for {longest}: shorten it")
    # Powers of two, so that prompts of about one length share a compiled program.
    budget = min(sampling.max_new_tokens, room)
    length = max(256, 1 << (len(prompt) + budget - 1).bit_length())
    engine, _ = backend_for(policy.model, None, policy.mesh, policy.mesh, slots=1, max_length=length)
    requests = OpenRequests(engine, dataclasses.replace(sampling, max_new_tokens=budget, stop_ids=config.tokens.eos))
    requests.submit(["answer"], [prompt], [seed])
    finished: dict[Any, Completion] = {}
    for over in generate_stream(requests, policy.model):
        finished |= over
        for running in requests.running.values() if screen else ():
            tell(stable_text(running.tokens, policy.tokenizer))
        if requests and stopped():
            requests.abort(requests.keys)
    text = text_of(policy.tokenizer, finished["answer"].tokens, config.tokens.eos)
    tell(text)
    if not printed:
        status("")
    print(flush=True)
    return dataclasses.replace(finished["answer"], text=text)


def stable_text(tokens: Any, tokenizer: Any) -> str:
    """Return the beginning of an answer's text that no later token can change: without an incomplete character, and
    without single bytes, since a tokenizer with byte tokens reads a whole row of them as characters, or not at all.
    """
    count = len(tokens)
    while count and re.fullmatch("<0x[0-9A-F]{2}>", tokenizer.convert_ids_to_tokens(int(tokens[count - 1])) or ""):
        count -= 1
    return text_of(tokenizer, tokens[:count]).rstrip("\ufffd")


def printable(text: str) -> str:
    """Replace control characters, which could drive the terminal, by spaces; line breaks and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def chat(policy: Policy, task: Task, sampling: Sampling, seed: int) -> None:
    """Answer message after message; the n-th of all is sampled with ``seed`` + n, counted from 0."""
    history: tuple[Message, ...] = ()
    print_note(GREETING)
    if task.template == "plain":
        print_note("the model has no chat template: messages are separated by blank lines only")
    for line in read_lines():
        if line in ("/bye", "/exit", "/quit"):
            return
        if line in ("/new", "/clear", "/reset"):
            history = ()
            print_note(FORGOTTEN)
        elif line in ("/help", "/?"):
            print_note(HELP)
        elif re.fullmatch(r"/[a-z?]+", line):
            print_note(f"unknown command {line}; /help lists the commands")
        else:
            try:
                history = take_turn(policy, (*history, {"role": "user", "content": line}), task, sampling, seed)
            except InputError as error:  # of this message: what was said before it stays
                print_note(f"jaxrl-llm: {error}")
            seed += 1


def take_turn(
    policy: Policy, messages: Sequence[Message], task: Task, sampling: Sampling, seed: int
) -> tuple[Message, ...]:
    """Answer the last message; return the chat with the answer, or the earlier chat if the answer is empty."""
    _, recent = fit_context(policy, messages, task, sampling.max_new_tokens)
    if len(recent) < len(messages):
        longest = policy.model.config.attention.rope.max_positions
        print_note(f"the chat is longer than the model's context ({longest} tokens): its beginning is left out")
    interrupts: list[int] = []

    def interrupted(number: int) -> None:  # the first Ctrl-C ends the answer, the second the program
        if interrupts or number != signal.SIGINT:
            quit_now(128 + number, "interrupted")
        interrupts.append(number)

    with answering(interrupted):
        speak = lambda ids: print_answer(policy, ids, seed, sampling, lambda: bool(interrupts))  # noqa: E731
        replies, completion = answer_chat(policy, recent, task, speak)
    count = len(completion.tokens)
    if completion.finish_reason == "length":
        why = "--max_new_tokens allows no more" if count == sampling.max_new_tokens else "the model's context is full"
        print_note(f"cut off after {count} tokens: {why}")
    return (*word_prompt(recent, task), *replies) if replies else tuple(recent[:-1])


def fit_context(
    policy: Policy, messages: Sequence[Message], task: Task, longest: int
) -> tuple[Sequence[int], Sequence[Message]]:
    """Return the token ids of a chat, and the chat, without the first turns that leave no room for an answer:
    ``longest`` tokens, or a quarter of the model's positions if less. The system message and the last message stay.
    """
    positions = policy.model.config.attention.rope.max_positions
    room = positions - min(longest, positions // 4)
    recent = list(messages)
    while len(tokens := encode_chat(policy, recent, task)) > room:
        first = 1 if recent[0]["role"] == "system" else 0
        later = [at for at in range(first + 1, len(recent)) if recent[at]["role"] == "user"]
        if not later:  # a turn is what a person says, and all up to the person's next words
            break
        del recent[first : later[0]]
    return tokens, recent


def read_lines() -> Iterator[str]:
    """Yield the non-empty lines that a person types, up to Ctrl-D."""
    import termios

    with contextlib.suppress(ImportError):
        import readline  # from here on lines can be edited, and earlier ones found again

        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message, line breaks and all

    def put_back(*reason: object) -> None:
        # Escape sequence that turns off a terminal's marks around pasted text.
        os.write(sys.stdin.fileno(), b"\x1b[?2004l")
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)

    while True:
        mode = termios.tcgetattr(sys.stdin)  # which readline changes
        try:
            with on_exit(put_back):
                if sys.stdout.isatty():
                    line = input(PROMPT)
                else:  # answers go elsewhere than to the terminal
                    print(PROMPT, end="", file=sys.stderr, flush=True)
                    if not (line := sys.stdin.readline()):
                        raise EOFError
        except EOFError:
            print_note("")
            return
        if line.strip():
            yield line.strip()


def print_note(text: str) -> None:
    """Print a notice on stderr, apart from the answers."""
    print(text, file=sys.stderr, flush=True)
