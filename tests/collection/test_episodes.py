"""Whole episodes as rows: the right ones, with the tools that were offered, and read again token by token."""

import dataclasses
import json
import time

import numpy as np
import pytest
from talkative import talkative

from jaxrl_llm import Environment, Step
from jaxrl_llm.collection.rejection_sampling import CollectionPlan, answer_value, collect_rows, decode_answer
from jaxrl_llm.data import Collected, Texts, check_collected, load_texts
from jaxrl_llm.environments import Limits
from jaxrl_llm.environments.examples import multiply
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rollout import Engine
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.evaluate import start_prompts
from jaxrl_llm.rollout.generation import Answerer, OpenRequests, generate_all
from jaxrl_llm.tasks import Prompts, Table, Task, load
from jaxrl_llm.tasks.messages import tool_call
from jaxrl_llm.types import Completion, Episode, Turn

pytestmark = pytest.mark.slow

LIMITS = Limits(max_turns=3)
LONGEST = 90


class Twice(Environment):
    """Asks twice, the second time in two messages; the episode is worth 1 if a 2 was said both times."""

    def reset(self, row, seed):
        self.said = []
        return [{"role": "user", "content": f"game {row['answer']}"}]

    def step(self, reply):
        self.said.append("2" in reply["content"])
        if len(self.said) == 2:
            return Step([{"role": "user", "content": "bye"}], float(all(self.said)), done=True)
        return Step([{"role": "user", "content": "again"}, {"role": "user", "content": "now\n"}])


@pytest.fixture(scope="module")
def by():
    model, tokenizer = talkative()
    with Scorer((Accuracy(),), 1) as scorer:
        yield Answerer(Engine(model, 8, 640 + LONGEST, 8), model, tokenizer, scorer)


def question(by, **changes):
    rows = [{"prompt": f"Say {n}", "answer": n % 2 + 1} for n in range(5)]
    given = {"template": "chatml", "system": "Play.", "suffix": "!\n", "verifier": "none", "environment": Twice}
    task = Task(rows, **given | changes)
    data = Collected(task, samples=8, keep="all")
    prompts = Prompts(task, by.tokenizer)
    found = CollectionPlan(prompts, load(task).train, data, "texts", LONGEST, 3, episode=LIMITS)
    return dataclasses.replace(by, episodes=Episodes(prompts, LIMITS, 640, by.model.config.tokens.eos)), found


class Sometimes(Twice):
    """Takes turns of unequal length to answer."""

    def step(self, reply):
        time.sleep(0.01 * (len(reply["content"]) % 5))
        return super().step(reply)


def collected_episodes(by, peers, path):
    """Collect short episodes with these processes; return the counts in words."""
    rows = [{"prompt": f"{n}", "answer": n % 2 + 1} for n in range(3)]
    task = Task(rows, template="chatml", verifier="none", environment=Sometimes)
    prompts = Prompts(task, by.tokenizer)
    episodes = Episodes(prompts, LIMITS, 50, by.model.config.tokens.eos, peers)
    asked = CollectionPlan(prompts, load(task).train, Collected(task, samples=8), "texts", 46, 5, episode=LIMITS)
    found = collect_rows(dataclasses.replace(by, episodes=episodes), asked, path, peers)
    return f"{found.answers} episodes, {found.right} right, {found.rows} rows, {found.length} tokens"


def played(by, asked):
    """Of each problem its prompt and its episodes, asked again in one go."""
    places = [(i, sample) for i in range(len(asked.problems)) for sample in range(8)]
    wanted = [asked.problems[i] for i, _ in places]
    seeds = [asked.answer_seed(*place) for place in places]
    prompts, begun = start_prompts(by, asked.prompts, wanted, seeds, 8, places)
    requests = OpenRequests(by.engine, asked.sampling(by.model.config.tokens.eos), by.episodes)
    requests.submit(places, prompts, seeds, partials=begun)
    done = generate_all(requests, by.model, by.tokenizer)
    return [(problem, prompt, done[place]) for problem, prompt, place in zip(wanted, prompts, places, strict=True)]


def test_right_episodes_are_rows_that_are_read_as_they_were_sampled(by, tmp_path):
    by, asked = question(by, tools=(multiply,))
    path = tmp_path / "rows.jsonl"
    counts = collect_rows(by, asked, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == counts.rows > 3 and all(row["tools"][0]["function"]["name"] == "multiply" for row in rows)
    data = Texts(Table(str(path)), template="chatml", system="Play.", suffix="!\n")
    learned = load_texts(data, by.tokenizer, by.model.config.tokens.eos).train
    known = {}
    for problem, prompt, completion in played(by, asked):
        episode = completion.episode
        spoke = all(turn.reply["content"].strip() for turn in episode.turns)
        if episode.end == "completed" and episode.reward == 1 and spoke:
            known[problem.id, completion.tokens.tobytes()] = prompt, completion
    found = {(row["id"], text.tokens.tobytes()): text for row, text in zip(rows, learned, strict=True)}
    assert found.keys() == known.keys()
    for place, text in found.items():
        prompt, completion = known[place]
        np.testing.assert_array_equal(text.prompt, prompt)
        np.testing.assert_array_equal(text.mask, completion.mask)
    assert [one["role"] for one in rows[0]["completion"]] == ["assistant", "user", "assistant"]


def test_a_collection_of_another_environment_is_not_gone_on_with(by, tmp_path):
    by, asked = question(by)
    settings = [one.settings(by.model) for one in (asked, dataclasses.replace(asked, episode=Limits()))]
    assert settings[0]["environment"].endswith("Twice") and settings[0] != settings[1]


def test_a_verifier_decides_before_the_environment(by):
    asked = question(by)[1].problems[0]
    completion = dataclasses.replace(ended(), episode=Episode(end="completed", reward=2.0))
    assert answer_value(asked, completion, np.nan, ()) == 2.0
    assert answer_value(dataclasses.replace(asked, verifier="match"), completion, 0.0, ()) == 0.0
    cut = dataclasses.replace(completion.episode, turns=(Turn(2, {}), Turn(5, {})))
    assert answer_value(asked, dataclasses.replace(completion, episode=cut), np.nan, (1,)) == 2.0
    completion.tokens[1] = 7
    assert answer_value(asked, dataclasses.replace(completion, episode=cut), np.nan, (1,)) == 0.0, (
        "its first turn was cut"
    )


def ended(*turns, end="completed"):
    episode = Episode(tuple(turns), end)
    tokens = np.ones(5, np.int32)
    return Completion(tokens, np.zeros(5), "stop", tokens > 0, tokens, episode=episode)


def test_an_episode_is_a_row_up_to_the_models_last_words_if_it_came_to_its_end(by):
    call = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [tool_call(0, "f", {})]}
    result = {"role": "tool", "name": "f", "content": "3"}
    turns = Turn(3, call, (result,)), Turn(5, {"role": "assistant", "content": "3"})
    whole = decode_answer(by.tokenizer, ended(*turns), True)
    assert whole.ended and whole.messages == [call, result, turns[1].reply]
    assert decode_answer(by.tokenizer, ended(turns[0], end="tool_stopped"), True).messages == [call]
    [first, *_] = decode_answer(by.tokenizer, ended(*turns), True, as_text=True).messages
    assert first["content"] == "<think>\nHm.\n</think>\n\n" and "reasoning_content" not in first
    assert not decode_answer(by.tokenizer, ended(*turns, end="max_turns"), True).ended
    silent = Turn(5, {"role": "assistant", "content": " "})
    assert not decode_answer(by.tokenizer, ended(turns[0], silent), True).ended


@pytest.mark.parametrize(("kind", "changes", "words"), [
    ("pairs", {}, "whole episodes are collected: as texts, with a chat template .got pairs"),
    ("texts", {"template": "plain"}, "whole episodes are collected: as texts, with a chat template .got texts, --ta"),
    ("texts", {"environment": None, "tools": (multiply,)}, "task.verifier none leaves nothing to collect by"),
])  # fmt: skip
def test_what_makes_no_rows_is_refused(by, kind, changes, words):
    with pytest.raises(InputError, match=words):
        check_collected(question(by, **changes)[1].data, kind, "--")
