"""Settings of judges: behind an endpoint that speaks OpenAI's chat form, or on the run's own devices."""

import dataclasses
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, ClassVar

from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import MODEL, PATH, Range, check_fields

ROUTE = "/chat/completions"
Option = tuple[str, str | float | int | bool]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A model that answers ``POST url/chat/completions``, OpenAI's chat form: a hosted one, or vLLM, llama.cpp, ollama.

    The key is read from the environment when a request is made; a configuration holds its variable's name alone.
    Limits are those of one process.

    Attributes:
      url: base of the address, such as ``http://localhost:8000/v1``, with or without ``/chat/completions``; a name such
        as ``$JUDGE_URL`` in it stands for an environment variable, so that a resumed run may find the model elsewhere.
      model: name of the model there.
      key_env: environment variable that holds the key; empty for an endpoint without one.
      options: further fields of each request, by name.
      concurrency: requests under way at one time.
      requests_per_minute: the most that begin in a minute, evenly spaced; 0 for no limit.
      timeout_s: seconds for one request.
      deadline_s: seconds for all requests of a batch of completions; what has no answer by then has failed.
      retries: further tries after 408, 429, 5xx, a lost connection, a timeout or a response that is no answer.
      backoff_s: pause before the first of them; each further pause is twice as long. ``Retry-After`` comes first.
      cache: a file of JSON lines with the answers by content, which other runs may share; None keeps them in memory.
      prices: dollars for a million tokens of the prompt, and of the answer.
    """

    url: str
    model: str
    key_env: str = ""
    options: tuple[Option, ...] = (("temperature", 0.0), ("max_tokens", 1024))
    concurrency: Annotated[int, Range("[1, inf]")] = 16
    requests_per_minute: Annotated[float, Range("[0, inf)", "0 is no limit")] = 0.0
    timeout_s: Annotated[float, Range("(0, inf)", words="above 0 seconds")] = 60.0
    deadline_s: Annotated[float, Range("(0, inf)", words="above 0 seconds")] = 600.0
    retries: Annotated[int, Range("[0, inf)")] = 4
    backoff_s: Annotated[float, Range("(0, inf)", words="above 0 seconds")] = 1.0
    cache: Annotated[str | None, PATH] = None
    prices: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self):
        options = self.options.items() if isinstance(self.options, Mapping) else self.options
        object.__setattr__(self, "options", tuple((name, value) for name, value in options))
        object.__setattr__(self, "prices", tuple(self.prices))

    @property
    def address(self) -> str:
        """The address that is asked."""
        return os.path.expandvars(self.url).rstrip("/").removesuffix(ROUTE) + ROUTE

    @property
    def key(self) -> str:
        """The key; empty without one."""
        return os.environ.get(self.key_env, "").strip() if self.key_env else ""

    def check(self, where: str) -> None:
        """Refuse an address, a key or prices that cannot work; no message quotes a key.

        Args:
          where: name of the setting with a final dot.

        Raises:
          InputError: names the setting and the remedy.
        """
        check_fields(self, where)
        parts = urllib.parse.urlsplit(os.path.expandvars(self.url))
        unset = "$" in parts.netloc + parts.path
        require(not unset, f"{where}url names an environment variable that is not set: export it, or write the address")
        require(
            parts.scheme in ("http", "https") and bool(parts.hostname),
            f"{where}url is not an address of an endpoint: give one such as http://localhost:8000/v1",
        )
        require(
            not (parts.username or parts.password or parts.query),
            f"{where}url holds a user, a password or a query, which config.json would show: put the key into an "
            f"environment variable, and its name into {where}key_env",
        )
        require(bool(self.model), f"{where}model is empty: give the name of the model at {self.url}")
        require(
            not self.key_env or re.fullmatch(r"[A-Za-z_]\w*", self.key_env, re.ASCII) is not None,
            f"{where}key_env is not the name of an environment variable: put the key into one, and give its name",
        )
        require(
            not self.key_env or bool(self.key),
            f"{where}key_env names {self.key_env}, which the environment lacks: export it, or set key_env to '' for "
            "an endpoint without a key",
        )
        plain = self.key.isascii() and self.key.isprintable() and " " not in self.key
        require(plain, f"the key in {self.key_env} holds white space or characters that no header can have: correct it")
        reserved = sorted({"model", "messages", "stream", "n"} & {name for name, _ in self.options})
        require(not reserved, f"{where}options holds {', '.join(reserved)}, which each request sets: leave it out")
        require(
            len(self.prices) == 2 and all(0 <= price < float("inf") for price in self.prices),
            f"{where}prices must be two numbers of at least 0, dollars for a million tokens of prompt and answer",
        )


@dataclasses.dataclass(frozen=True)
class JudgeModel:
    """A frozen model on the devices that sample, which answers in slots of its own: greedily, each question alone.

    Its verdict is a function of its weights and the question: no neighbour in a batch changes it, a run that resumes
    repeats it. It is loaded once in ``learner.compute.dtype``, with a tokenizer and a chat template of its own.

    Attributes:
      model: any model or run: RUN, RUN@STEP, a directory, a .gguf file, a hub id.
      slots: questions answered at one time.
      max_prompt_tokens: of a question; one that is longer has no score.
      max_new_tokens: of an answer; one that is cut off is no verdict.
      options: passed to the chat template, such as ``(("enable_thinking", False),)``.
      date: for chat templates that ask for it; fixed, so that answers repeat.
    """

    model: Annotated[str, MODEL]
    slots: Annotated[int, Range("[1, inf)")] = 8
    max_prompt_tokens: Annotated[int, Range("[1, inf)")] = 1536
    max_new_tokens: Annotated[int, Range("[1, inf)")] = 512
    options: tuple[Option, ...] = ()
    date: str = "2025-07-01"
    prices: ClassVar[tuple[float, float]] = (0.0, 0.0)
    label: ClassVar[str] = "judge"
    template: ClassVar[str] = "tokenizer"
    system: ClassVar[str | None] = None
    suffix: ClassVar[str] = ""

    def __post_init__(self):
        options = self.options.items() if isinstance(self.options, Mapping) else self.options
        object.__setattr__(self, "options", tuple((name, value) for name, value in options))

    @property
    def max_length(self) -> int:
        """Question and answer together, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens

    def check(self, where: str) -> None:
        """Refuse sizes that cannot work, and a missing name; arguments and errors as of ``Endpoint.check``."""
        check_fields(self, where)
        require(bool(self.model), f"{where}model is empty: give a run, a directory, or a hub id")
        require(
            re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.date, re.ASCII) is not None,
            f"{where}date {self.date!r} is not a date; write it as 2025-07-01",
        )
