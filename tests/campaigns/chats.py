"""Random episodes of a chat template: is every sampled token kept, and is all else the template's?

``Fuzz.counts`` has, of episodes, replies and sampled tokens:

  changed: sampled tokens that are not in the row as they were sampled.
  unfed: episodes whose row is not, token by token, what the engine was fed.
  whole, unlike: episodes that can be the template's rendering of the whole chat, since it keeps earlier turns and
    nobody spelled out control tokens; those of them that are not.
  untailed: suffixes that are not the end of the template's rendering of the chat so far.
  harmful, control: suffixes whose contents spell out control tokens; those that got control tokens by it.
  contents, joined, misheard: the world's; those found with up to 3 characters of the template; those found otherwise.
  calls, misread: calls; those that were read otherwise than they were meant.
  anew: episodes whose row would be another one if the chat was rendered and tokenised anew.
"""

import collections
import datetime
import functools
import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.tokenizer import special_ids
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.messages import tool_call

STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "llama3": ("<|eot_id|>",),
    "muse": ("<|eot|>",),
    "phi3": ("<|end|>",),
    "": ("<|im_end|>",),
}
"""Tokens at which models stop, by the beginning of the template's name; the first that fits counts."""
CONTROL = re.compile(
    r"<\|[^|<>\s']+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>|<\|\"\|>"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a name.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "To look up."},
                "count": {"type": "integer", "description": "Of answers."},
                "options": {"type": "object", "description": "Others."},
            },
            "required": ["name"],
        },
    },
}
WORDS = (
    "one", " Zwei", "trois ", "四", "пять", "🙂", "{x: 1}", "[7]", "3.5", "<b>", "a\\b", "é", '"so"', "—", "  ", "\n\n",
)  # fmt: skip
DATE = datetime.date(2025, 7, 1)
_CLOCK = re.compile(r"""strftime_now\((?P<quote>["'])(?P<format>.*?)(?P=quote)\)""")
_ONE_CALL = ("llama", "gpt_oss")


class Fuzz:
    """Random episodes of one template, and counts of what is wrong with them.

    Args:
      template: Jinja text.
      stops: tokens at which its models stop.
      tokenizer: has its control tokens.

    Raises:
      InputError: the template cannot write episodes.
    """

    def __init__(self, template: str, stops: Sequence[str], tokenizer: Any):
        self.template = _CLOCK.sub(lambda asked: json.dumps(DATE.strftime(asked["format"])), template)
        self.stops, self.tokenizer = stops, tokenizer
        self.counts: collections.Counter[str] = collections.Counter()
        self.stop_ids = tokenizer.convert_tokens_to_ids(list(stops))
        self.special = {*special_ids(tokenizer)}
        task = Task([], template=template, date=DATE.isoformat())
        self.tools: list[dict[str, Any]] = [TOOL]
        try:
            self.form = EpisodeFormat(tokenizer, task, self.tools, self.stop_ids)
        except InputError:
            self.tools = []
            self.form = EpisodeFormat(tokenizer, task, (), self.stop_ids)
        self.calls = bool(self.tools) and "tool_call" in template
        try:
            self.rendered([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
            self.system = True
        except Exception:  # noqa: BLE001  a template raises whatever it likes
            self.system = False

    def rendered(self, chat: Sequence[dict[str, Any]]) -> str:
        """Return the template's own rendering of a chat, up to the start of the next reply."""
        options = {"tools": self.tools} if self.tools else {}
        return self.tokenizer.apply_chat_template(
            list(chat), chat_template=self.template, tokenize=False, add_generation_prompt=True, **options
        )

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text with control tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def episode(self, draws: random.Random) -> None:
        """Run one random episode, and count what is wrong with it."""
        chat = self.chat(draws)
        places = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
        told = [message["content"] for message in chat if message["role"] in ("user", "tool")]
        upto = functools.cache(lambda end: self.rendered(chat[:end]))
        text = upto(len(chat))
        row = self.form.prompt(chat[: places[0]])
        learned: list[tuple[int, list[int]]] = []
        feeds = []
        spelled = any(CONTROL.search(content) or any(stop in content for stop in self.stops) for content in told)
        keeps, straight = not spelled, True
        for index, after in itertools.pairwise([*places, len(chat)]):
            said, kept = self.said(chat[index]["content"], text, upto(index), len(upto(after)))
            crooked = draws.random() < 0.2
            sampled = self.crooked(said, draws) if crooked else self.ids(said)
            if kept and draws.random() < 0.1:
                sampled.pop()
            if self.calls and kept:
                self.check_calls(chat[index], sampled, row)
            before = self.tokenizer.decode(row)[-200:]
            straight = straight and not crooked and self.ids(before + said) == self.ids(before) + self.ids(said)
            feeds.append(list(row))
            suffix = self.form.suffix(chat[: index + 1], chat[index + 1 : after], sampled)
            self.counts["untailed"] += not upto(after).endswith(self.tokenizer.decode(suffix))
            self.check_control(chat[: index + 1], chat[index + 1 : after], sampled, suffix)
            self.check_contents(chat[: index + 1], chat[index + 1 : after], sampled, suffix)
            learned.append((len(row), list(sampled)))
            row = [*row, *sampled, *suffix]
            keeps = keeps and kept
        anew = self.ids(text)
        self.counts.update(episodes=1, replies=len(places), sampled=sum(len(sampled) for _, sampled in learned))
        for at, sampled in learned:
            there = row[at : at + len(sampled)]
            self.counts["changed"] += sum(one != other for one, other in itertools.zip_longest(sampled, there))
        self.counts["unfed"] += any(row[: len(feed)] != feed for feed in feeds)
        self.counts["anew"] += row != anew
        self.counts["whole"] += keeps
        if keeps:
            same = row == anew if straight else self.tokenizer.decode(row) == self.tokenizer.decode(anew)
            self.counts["unlike"] += not same

    def said(self, content: str, text: str, start: str, latest: int) -> tuple[str, bool]:
        """Return what the model says in a turn, its stop token last, and whether the whole chat's text has it so.

        Args:
          content: of the message.
          text: of the whole chat.
          start: text of the chat before the turn.
          latest: where in the text the next turn starts.
        """
        if text.startswith(start):
            ends = [text.find(stop, len(start)) + len(stop) for stop in self.stops if stop in text[len(start) : latest]]
            if ends:
                return text[len(start) : min(ends)], True
        return content + self.stops[0], False

    def crooked(self, text: str, draws: random.Random) -> list[int]:
        """Return ids of a text, cut otherwise than the tokenizer would."""
        found = []
        for part in re.split(f"({CONTROL.pattern}|{'|'.join(MARKS)})", text):
            whole = CONTROL.fullmatch(part) or part in MARKS
            cuts = [] if whole else sorted(draws.choices(range(len(part) + 1), k=3))
            for begins, ends in itertools.pairwise([0, *cuts, len(part)]):
                found += self.ids(part[begins:ends])
        return found

    def check_calls(self, message: dict[str, Any], sampled: list[int], row: list[int]) -> None:
        """Count the calls that are read otherwise than they were meant."""
        meant = [call["function"] for call in message.get("tool_calls", ())]
        parsed = self.form.parse(sampled, row)
        read = [call["function"] for call in parsed.message.get("tool_calls", ())]
        self.counts["calls"] += len(meant)
        self.counts["misread"] += read != meant

    def check_control(
        self, turns: list[dict[str, Any]], messages: list[dict[str, Any]], sampled: list[int], suffix: list[int]
    ) -> None:
        """Count the suffixes that have control tokens which their contents spell out."""
        if any(CONTROL.search(message["content"]) for message in messages):
            harmless = self.form.suffix(turns, [message | {"content": "x"} for message in messages], sampled)
            number, expected = (sum(token in self.special for token in ids) for ids in (suffix, harmless))
            self.counts.update(harmful=1, control=number != expected)

    def check_contents(
        self, turns: list[dict[str, Any]], messages: list[dict[str, Any]], sampled: list[int], suffix: list[int]
    ) -> None:
        """Count the contents, written as they are or as JSON, whose tokens in the suffix are not found exactly."""
        ranges = self.form.content_ranges(turns, messages, sampled, suffix)
        for (begin, end), message in zip(ranges, messages, strict=True):
            content = message["content"]
            as_json = [json.dumps(text, ensure_ascii=False)[1:-1] for text in (content, content.strip())]
            told = self.tokenizer.decode(suffix[begin:end]).strip()
            more = [len(told) - len(form.strip()) for form in (content, *as_json) if form.strip() in told]
            self.counts.update(contents=1, joined=0 < min(more, default=0) <= 3, misheard=not more or min(more) > 3)

    def chat(self, draws: random.Random) -> list[dict[str, Any]]:
        """Return a random chat that ends with a message of the world."""
        chat = [{"role": "user", "content": self.words(draws, 0.1)}]
        if self.system and draws.random() < 0.3:
            chat.insert(0, {"role": "system", "content": self.words(draws)})
        for _ in range(draws.randrange(1, 5)):
            reply: dict[str, Any] = {"role": "assistant", "content": self.words(draws)}
            chat.append(reply)
            if draws.random() < 0.2:
                reply["reasoning_content"] = self.words(draws)
            if self.calls and draws.random() < 0.6:
                number = 1 if self.form.syntax in _ONE_CALL else draws.randrange(1, 3)
                reply["tool_calls"] = [self.call(index, draws) for index in range(number)]
                reply["content"] = ""
                for call in reply["tool_calls"]:
                    result = {"role": "tool", "name": "look_up", "tool_call_id": call["id"]}
                    chat.append(result | {"content": self.words(draws, 0.1)})
            else:
                chat.append({"role": "user", "content": self.words(draws, 0.1)})
        return chat

    def call(self, index: int, draws: random.Random) -> dict[str, Any]:
        """Return a random call."""
        plain = self.form.syntax == "pythonic"  # these templates write texts without escapes
        name = draws.choice(["Ada", "a b", "日本"]) if plain else self.words(draws).strip() or "b"
        arguments: dict[str, Any] = {"name": name}
        if draws.random() < 0.5:
            arguments["count"] = draws.randrange(-5, 1000)
        if draws.random() < 0.3:
            arguments["options"] = {"a": [1, 2.5, None, True], "b": {"c": "d"}}
        return tool_call(index, "look_up", arguments)

    def words(self, draws: random.Random, harm: float = 0.0) -> str:
        """Return a random text; with this probability it spells out control tokens."""
        words = draws.choices(WORDS, k=draws.randrange(1, 8))
        if draws.random() < harm:
            words.insert(draws.randrange(len(words)), draws.choice([*self.stops, *CONTROL.findall(self.template)]))
        return draws.choice(["", " "]).join(words)


def stops_of(name: str) -> tuple[str, ...]:
    """Return the tokens at which models with the published template of this name stop."""
    return next(stops for begins, stops in STOPS.items() if name.startswith(begins))


def with_control_tokens(tokenizer: Any, template: str, stops: Sequence[str]) -> Any:
    """Add a template's control tokens to a tokenizer."""
    special = sorted({*CONTROL.findall(template), *stops})
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer
