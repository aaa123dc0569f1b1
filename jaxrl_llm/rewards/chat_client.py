"""Client of an endpoint that speaks OpenAI's chat form: bounded concurrency, retries, a rate limit, a cache."""

import collections
import dataclasses
import functools
import http.client
import itertools
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.codec import digest
from jaxrl_llm.rewards.endpoint import Endpoint
from jaxrl_llm.types import Message

MOST_KEPT = 100_000
"""Number of answers kept in memory; beyond it the oldest are forgotten."""
MOST_BYTES = 8 * 1024**2
"""Size of a response beyond which it is no answer."""
LONGEST_PAUSE_S = 60.0
"""Longest pause before another try, unless the endpoint asks for a longer one."""
HIDDEN = "***"
"""Text in place of the key in whatever an endpoint says."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
      text: of the answer.
      prompt_tokens: tokens of the prompt, as the endpoint counts them; NaN if it does not.
      completion_tokens: those of the answer.
      cached: whether it was known; its tokens are 0 then.
    """

    text: str
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    cached: bool = False

    def cost(self, prices: tuple[float, float]) -> float:
        """Return the price of the answer in dollars, for ``prices`` of a million tokens of prompt and answer."""
        return (self.prompt_tokens * prices[0] + self.completion_tokens * prices[1]) / 1e6


class EndpointError(RuntimeError):
    """Failure of a request.

    Attributes:
      again: whether another try may succeed.
      pause_s: seconds that the endpoint asks to wait; None if it does not say.
    """

    def __init__(self, message: str, again: bool = False, pause_s: float | None = None):
        super().__init__(message)
        self.again = again
        self.pause_s = pause_s


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would carry the key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_StayHere)


class Client:
    """Owner of an endpoint's answers by content and of its rate; any thread may use it."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._next = 0.0
        self._known = _read(endpoint.cache)

    def ask(self, chats: Sequence[Sequence[Message]]) -> list[Answer | Exception]:
        """Return the answer to each chat, or the error that it ended with; equal chats are asked once."""
        keys = [self._content(chat) for chat in chats]
        known = {key: self._known[key] for key in keys if key in self._known}
        waiting = collections.deque({k: c for k, c in zip(keys, chats, strict=True) if k not in known}.items())
        new: dict[str, Answer | Exception] = {}
        deadline = time.monotonic() + self._endpoint.deadline_s

        def work() -> None:
            while waiting:
                try:
                    key, chat = waiting.popleft()
                except IndexError:
                    return
                try:
                    new[key] = self._keep(key, self._one(chat, deadline))
                except EndpointError as error:
                    new[key] = error.with_traceback(None)

        count = min(self._endpoint.concurrency, len(waiting))
        threads = [threading.Thread(target=work, name="judge", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = f"{self._endpoint.address} gave no answer within {self._endpoint.deadline_s:g} s"
        found: list[Answer | Exception] = []
        for key in keys:
            answer = known.get(key) or new.get(key, EndpointError(late))
            found.append(answer)
            if isinstance(answer, Answer):
                known[key] = dataclasses.replace(answer, prompt_tokens=0.0, completion_tokens=0.0, cached=True)
        return found

    def _content(self, chat: Sequence[Message]) -> str:
        e = self._endpoint
        return digest([e.url, e.model, e.options, list(chat)], 64)

    def _keep(self, key: str, answer: Answer) -> Answer:
        with self._lock:
            self._known[key] = Answer(answer.text, cached=True)
            if len(self._known) > MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            if self._endpoint.cache is not None:
                path = Path(self._endpoint.cache)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "text": answer.text}) + "\n")
        return answer

    def _one(self, chat: Sequence[Message], deadline: float) -> Answer:
        for tries in itertools.count():
            self._wait_for_turn(deadline)
            try:
                return self._post(chat, deadline)
            except EndpointError as error:
                pause = error.pause_s
                if pause is None:
                    pause = min(LONGEST_PAUSE_S, self._endpoint.backoff_s * 2**tries)
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
                said = f"{self._endpoint.address}: the rate limit left no turn within {self._endpoint.deadline_s:g} s"
                raise EndpointError(said)
            self._next = begins + (60 / limit if limit else 0.0)
        time.sleep(begins - now)

    def _post(self, chat: Sequence[Message], deadline: float) -> Answer:
        e, key = self._endpoint, self._endpoint.key
        body = {"model": e.model, "messages": list(chat)} | dict(e.options)
        headers = {"Content-Type": "application/json", "User-Agent": "jaxrl-llm"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        until = min(time.monotonic() + e.timeout_s, deadline)
        try:
            request = urllib.request.Request(e.address, json.dumps(body).encode(), headers)
            with _OPENER.open(request, timeout=max(until - time.monotonic(), 0.01)) as response:
                text = _body(response, until).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise _refusal(e.address, key, error) from None
        except TimeoutError:
            raise EndpointError(f"{e.address} gave no answer within {e.timeout_s:g} s", again=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise EndpointError(f"{e.address} gave no answer within {e.timeout_s:g} s", again=True) from None
            why = f"{e.address} cannot be reached ({_safe(str(reason), key)}): start it, or correct its url"
            raise EndpointError(why, again=True) from None
        return _answer(e.address, _safe(text, key))


@functools.cache
def client_of(endpoint: Endpoint) -> Client:
    """Return the client of an endpoint, one in each process: rewards of equal endpoints share rate and answers."""
    return Client(endpoint)


def _read(cache: str | None) -> dict[str, Answer]:
    """Return the answers in a cache's file; a line that was cut off by a kill is left out."""
    known: dict[str, Answer] = {}
    if cache is None or not Path(cache).exists():
        return known
    with Path(cache).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                known[str(row["key"])] = Answer(str(row["text"]), cached=True)
            except (ValueError, LookupError, TypeError):
                continue
    return known


def _body(response: http.client.HTTPResponse, until: float) -> bytes:
    """Read a response, however slowly it drips, until its end, its largest size, or its time is over."""
    parts = []
    size = 0
    while part := response.read1(65536):
        parts.append(part)
        size = size + len(part)
        if time.monotonic() > until:
            raise TimeoutError
        if size > MOST_BYTES:
            raise http.client.HTTPException(f"a response above {MOST_BYTES} bytes")
    return b"".join(parts)


def _refusal(address: str, key: str, error: urllib.error.HTTPError) -> EndpointError:
    with error:
        try:
            said = error.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            said = ""
    said = " ".join(_safe(said, key).split())[:200]
    again = error.code in (408, 429) or error.code >= 500
    after = error.headers.get("Retry-After", "")
    pause = min(float(after), 600.0) if re.fullmatch(r"\d+(\.\d+)?", after) else None
    remedy = {401: ": set key_env to the variable with its key", 404: ": correct its url or model"}.get(error.code, "")
    return EndpointError(f"{address} answered {error.code}{remedy} ({said})", again, pause if again else None)


def _safe(text: str, key: str) -> str:
    """Return what an endpoint said without the key, which some repeat."""
    return text.replace(key, HIDDEN) if key else text


def _answer(address: str, text: str) -> Answer:
    try:
        said = json.loads(text)
        content = said["choices"][0]["message"].get("content") or ""
        usage = said.get("usage") or {}
        read, written = (float(usage.get(name, "nan")) for name in ("prompt_tokens", "completion_tokens"))
        if not isinstance(content, str):
            raise TypeError
        return Answer(content, read, written)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        short = " ".join(text.split())[:80]
        raise EndpointError(f"{address} answered without choices[0].message.content ({short})", again=True) from None
