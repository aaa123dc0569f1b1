"""Settings of judges: behind an endpoint that speaks OpenAI's chat form, or on the run's own devices."""

import collections
import dataclasses
import functools
import http.client
import itertools
import json
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from jaxrl_llm.codec import digest
from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import MODEL, PATH, Range, check_fields
from jaxrl_llm.types import Message

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
        """Refuse an address, a key or prices that cannot work, of the setting ``where``; no message quotes a key."""
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


MAX_RESPONSE_BYTES = 8 * 1024**2
"""Size of a response beyond which it is no answer."""


@dataclasses.dataclass(frozen=True)
class JudgeAnswer:
    """A model's answer; token counts are NaN if the endpoint gives none, and 0 if the answer was cached."""

    text: str
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    cached: bool = False

    def cost(self, prices: tuple[float, float]) -> float:
        """Return the price of the answer in dollars, for ``prices`` of a million tokens of prompt and answer."""
        return (self.prompt_tokens * prices[0] + self.completion_tokens * prices[1]) / 1e6


class EndpointError(RuntimeError):
    """Failure of a request; ``again``: another try may succeed, after ``pause_s`` seconds if the endpoint says so."""

    def __init__(self, message: str, again: bool = False, pause_s: float | None = None):
        super().__init__(message)
        self.again = again
        self.pause_s = pause_s


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would carry the key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Client:
    """Owner of an endpoint's answers by content and of its rate; any thread may use it."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._next = 0.0
        self._cached = _read_cache(endpoint.cache)

    def ask(self, chats: Sequence[Sequence[Message]]) -> list[JudgeAnswer | Exception]:
        """Return the answer to each chat, or the error that it ended with; equal chats are asked once."""
        e = self._endpoint
        keys = [digest([e.url, e.model, e.options, list(chat)], 64) for chat in chats]
        cached = {key: self._cached[key] for key in keys if key in self._cached}
        waiting = collections.deque({k: c for k, c in zip(keys, chats, strict=True) if k not in cached}.items())
        new: dict[str, JudgeAnswer | Exception] = {}
        deadline = time.monotonic() + self._endpoint.deadline_s

        def work() -> None:
            while waiting:
                try:
                    key, chat = waiting.popleft()
                except IndexError:
                    return
                try:
                    new[key] = self._store(key, self._ask_with_retries(chat, deadline))
                except EndpointError as error:
                    new[key] = error.with_traceback(None)

        count = min(self._endpoint.concurrency, len(waiting))
        threads = [threading.Thread(target=work, name="judge", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = f"{self._endpoint.address} gave no answer within {self._endpoint.deadline_s:g} s"
        answers: list[JudgeAnswer | Exception] = []
        for key in keys:
            answer = cached.get(key) or new.get(key, EndpointError(late))
            answers.append(answer)
            if isinstance(answer, JudgeAnswer):
                cached[key] = dataclasses.replace(answer, prompt_tokens=0.0, completion_tokens=0.0, cached=True)
        return answers

    def _store(self, key: str, answer: JudgeAnswer) -> JudgeAnswer:
        with self._lock:
            self._cached[key] = JudgeAnswer(answer.text, cached=True)
            if len(self._cached) > 100_000:  # the oldest is forgotten
                self._cached.pop(next(iter(self._cached)))
            if self._endpoint.cache is not None:
                path = Path(self._endpoint.cache)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "text": answer.text}) + "\n")
        return answer

    def _ask_with_retries(self, chat: Sequence[Message], deadline: float) -> JudgeAnswer:
        for tries in itertools.count():
            self._wait_for_turn(deadline)
            try:
                return self._post(chat, deadline)
            except EndpointError as error:
                pause = error.pause_s
                if pause is None:
                    pause = min(60.0, self._endpoint.backoff_s * 2**tries)
                else:
                    with self._lock:
                        self._next = max(self._next, time.monotonic() + pause)
                if not error.again or tries >= self._endpoint.retries or time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
        raise AssertionError

    def _wait_for_turn(self, deadline: float) -> None:
        limit, now = self._endpoint.requests_per_minute, time.monotonic()
        with self._lock:
            begins = max(now, self._next)
            if begins > deadline:
                e = self._endpoint
                raise EndpointError(f"{e.address}: the rate limit left no turn within {e.deadline_s:g} s")
            self._next = begins + (60 / limit if limit else 0.0)
        time.sleep(begins - now)

    def _post(self, chat: Sequence[Message], deadline: float) -> JudgeAnswer:
        e, key = self._endpoint, self._endpoint.key
        body = {"model": e.model, "messages": list(chat)} | dict(e.options)
        headers = {"Content-Type": "application/json", "User-Agent": "jaxrl-llm"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        limit = min(time.monotonic() + e.timeout_s, deadline)
        try:
            request = urllib.request.Request(e.address, json.dumps(body).encode(), headers)
            opener = urllib.request.build_opener(_NoRedirects)
            with opener.open(request, timeout=max(limit - time.monotonic(), 0.01)) as response:
                text = _read_response(response, limit).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise _http_error(e.address, key, error) from None
        except TimeoutError:
            raise EndpointError(f"{e.address} gave no answer within {e.timeout_s:g} s", again=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise EndpointError(f"{e.address} gave no answer within {e.timeout_s:g} s", again=True) from None
            why = f"{e.address} cannot be reached ({_redact_key(str(reason), key)}): start it, or correct its url"
            raise EndpointError(why, again=True) from None
        return _parse_answer(e.address, _redact_key(text, key))


@functools.cache
def client_of(endpoint: Endpoint) -> Client:
    """Return the client of an endpoint, one in each process: rewards of equal endpoints share rate and answers."""
    return Client(endpoint)


def _read_cache(cache: str | None) -> dict[str, JudgeAnswer]:
    """Return the answers in a cache's file; a line that was cut off by a kill is left out."""
    answers: dict[str, JudgeAnswer] = {}
    if cache is None or not Path(cache).exists():
        return answers
    with Path(cache).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                answers[str(row["key"])] = JudgeAnswer(str(row["text"]), cached=True)
            except (ValueError, LookupError, TypeError):
                continue
    return answers


def _read_response(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Read a response, however slowly it drips, until its end, its largest size, or its time is over."""
    parts = []
    size = 0
    while part := response.read1(65536):
        parts.append(part)
        size = size + len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > MAX_RESPONSE_BYTES:
            raise http.client.HTTPException(f"a response above {MAX_RESPONSE_BYTES} bytes")
    return b"".join(parts)


def _http_error(address: str, key: str, error: urllib.error.HTTPError) -> EndpointError:
    with error:
        try:
            message = error.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            message = ""
    message = " ".join(_redact_key(message, key).split())[:200]
    again = error.code in (408, 429) or error.code >= 500
    retry_after = error.headers.get("Retry-After", "")
    pause = min(float(retry_after), 600.0) if re.fullmatch(r"\d+(\.\d+)?", retry_after) else None
    remedy = {401: ": set key_env to the variable with its key", 404: ": correct its url or model"}.get(error.code, "")
    return EndpointError(f"{address} answered {error.code}{remedy} ({message})", again, pause if again else None)


def _redact_key(text: str, key: str) -> str:
    """Return an endpoint's text without the key, which some repeat."""
    return text.replace(key, "***") if key else text


def _parse_answer(address: str, text: str) -> JudgeAnswer:
    try:
        reply = json.loads(text)
        content = reply["choices"][0]["message"].get("content") or ""
        usage = reply.get("usage") or {}
        if not isinstance(content, str):
            raise TypeError
        counts = [float(usage.get(name, "nan")) for name in ("prompt_tokens", "completion_tokens")]
        return JudgeAnswer(content, counts[0], counts[1])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        short = " ".join(text.split())[:80]
        raise EndpointError(f"{address} answered without choices[0].message.content ({short})", again=True) from None
