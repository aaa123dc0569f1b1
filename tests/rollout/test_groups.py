"""Groups from their place in the stream: prompts, seeds, texts and scores by the real engine; what is whole, what
teaches.
"""

import dataclasses
import json
import threading

import numpy as np
import pytest

from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rollout import Collect, Engine, Sampling
from jaxrl_llm.rollout.collect import Sampler, collect_groups
from jaxrl_llm.rollout.evaluate import end_in_loops, group_metrics
from jaxrl_llm.rollout.generation import request_seed
from jaxrl_llm.rollout.groups import AdmissionPolicy, Carryover, GroupSource, informative, is_finished
from jaxrl_llm.tasks import Curriculum, Dropping, Prompts, Scheduled, Shuffled, Table, Task, load
from jaxrl_llm.types import Completion, Group, Problem

LONGEST = 5


def group(accuracy, rewards=None):
    problem = Problem("0", ({"role": "user", "content": "?"},), "1", "test")
    rewards = np.asarray(rewards if rewards is not None else accuracy, float)
    return Group(problem, np.array([1]), (), rewards, np.asarray(accuracy, float))


def test_the_filter_looks_at_accuracy_and_not_at_the_reward():
    assert not informative(group([1, 1], rewards=[1.0, 0.4]))
    assert informative(group([1, 0], rewards=[0.5, 0.5]))
    assert informative(group([0, 0, 0, 1.5]))


def test_accuracies_that_differ_teach_and_equal_ones_do_not():
    assert informative(group([0.5, 0.75, 0.25, 0.5])) and informative(group([0.5, 0.0], rewards=[1, 1]))
    assert not informative(group([0.5] * 4, rewards=[1, 2, 3, 4]))
    assert not informative(group([0.1 + 0.2, 0.3])), "in the precision that advantages are computed in"


def test_a_curriculum_counts_an_answer_for_as_much_of_it_as_is_right():
    groups = [group(accuracy) for accuracy in ([0.5, 0.75, 0.25, 0.5], [1.0, 1.5], [0.0, -1.0], [0.5, 0.5])]
    groups = [dataclasses.replace(g, problem=dataclasses.replace(g.problem, id=str(n))) for n, g in enumerate(groups)]
    stream = Scheduled(Curriculum(drop=Dropping(1, 1), strength=0), [g.problem for g in groups], 0)
    memory = stream.observe({}, groups)
    assert stream.success(memory).tolist() == [0.5, 1, 0, 0.5]
    assert memory["streak"].tolist() == [0, 1, -1, 0], "what is right in part is neither solved nor unsolved"


def test_a_filter_of_the_reward_takes_whatever_the_estimator_can_tell_apart():
    assert informative(group([0, 0], rewards=[0.5, 0.0]), "reward") and informative(
        group([1, 1], rewards=[1.0, 0.4]), "reward"
    )
    assert not informative(group([1, 0], rewards=[0.5, 0.5]), "reward")
    assert not informative(group([0, 0], rewards=[0.1 + 0.2, 0.3]), "reward")  # as float32 they are equal


@pytest.mark.parametrize("reads", ["accuracy", "reward"])
def test_who_could_not_be_scored_has_no_say(reads):
    none = float("nan")
    assert not informative(group([1, 1, 0], rewards=[1, 1, none]), reads)
    assert not informative(group([0, 0, 1], rewards=[0, 0, none]), reads)
    assert informative(group([1, 0, 0], rewards=[1, 0, none]), reads)
    assert not informative(group([0, 0], rewards=[none, none]), reads)
    assert not informative(group([1, 1, none], rewards=[1, 1, 1]), reads)


def test_request_seeds_are_unique_within_a_run_and_between_runs():
    numbers = [0, 1, 2, (1 << 39), (1 << 39) + 1, (1 << 40) - 1]
    seeds = {request_seed(run, n) for run in (0, 1, 2, (1 << 24) - 1) for n in numbers}
    assert len(seeds) == 4 * len(numbers) and all(0 <= seed < 1 << 64 for seed in seeds)


@pytest.mark.parametrize(("reason", "size", "ends"), [
    ("stop", 1, True), ("repetition", 2, True), ("length", 5, True), ("length", 4, False), ("aborted", 4, False),
])  # fmt: skip
def test_a_completion_is_whole_unless_a_budget_or_an_interruption_ended_it(reason, size, ends):
    tokens = np.zeros(size, np.int32)
    completion = Completion(tokens, tokens.astype(np.float32), reason, tokens == 0, tokens)
    assert is_finished(completion, LONGEST) == ends
    assert not is_finished(None, LONGEST)


def ended(*reasons):
    """A group whose completions ended so; their rewards are those given to ``group``."""
    token = np.zeros(1, np.int32)
    completions = tuple(Completion(token, token.astype(np.float32), reason, token == 0, token) for reason in reasons)
    return dataclasses.replace(group([0] * len(reasons)), completions=completions)


def test_what_was_not_measured_is_not_a_number():
    nothing = group_metrics([])
    assert nothing.keys() == group_metrics([ended("stop")]).keys() and np.isnan(list(nothing.values())).all()
    none = np.full(2, np.nan)
    unscored = group_metrics([dataclasses.replace(ended("stop", "stop"), rewards=none, parts={"part": none})])
    lost = ("mean", "std", "part", "p10", "p50", "p90")
    assert np.isnan([unscored[f"reward/{name}"] for name in lost]).all()
    assert np.isnan(unscored["reward/zero_std_fraction"]), "no reward is no equal reward"
    assert np.isnan(group_metrics([ended("stop")])["reward/zero_std_fraction"]), "one completion is like no other"


def test_groups_of_equal_rewards_are_those_that_no_estimator_can_tell_apart():
    rewards = ([0.5, 0.1], [0.3, 0.1 + 0.2], [1, 1], [float("nan"), 2])
    groups = [dataclasses.replace(ended("stop", "stop"), rewards=np.array(r, float)) for r in rewards]
    assert group_metrics(groups)["reward/zero_std_fraction"] == 0.75
    unscored = dataclasses.replace(groups[0], rewards=np.full(2, np.nan))
    assert group_metrics([*groups, unscored])["reward/zero_std_fraction"] == 0.75, "what has no reward does not count"


def test_different_answers_are_counted_in_whatever_words_they_are_given():
    def share(*texts, **changes):
        made = ended(*["stop"] * len(texts))
        said = tuple(dataclasses.replace(c, text=text) for c, text in zip(made.completions, texts, strict=True))
        return dataclasses.replace(made, completions=said, problem=dataclasses.replace(made.problem, **changes))

    of = lambda *groups: group_metrics(groups)["completions/distinct_fraction"]
    assert of(share("so 3", "it is ３.", "4", "I do not know")) == 0.75
    assert of(share("3", "3"), share("3", "4")) == 0.75
    assert of(share("a 3", "b 3", verifier="none")) == 1.0 and np.isnan(of(share("3")))


def completed(*rows, reason="length"):
    """A group of completions of these tokens; its rewards are 0, 1, 2, ..."""
    arrays = [np.array(row, np.int32) for row in rows]
    completions = tuple(Completion(row, row.astype(np.float32), reason, np.ones(len(row), bool), row) for row in arrays)
    return dataclasses.replace(group(np.arange(len(rows))), completions=completions)


def test_completions_that_repeat_themselves_are_counted_however_they_ended():
    assert (
        group_metrics([ended("stop", "repetition"), ended("length", "stop")])["completions/repetition_fraction"] == 0.25
    )
    again = [5, 1, 2, 3] * 6
    assert group_metrics([completed([9, *again], [*again, 9])])["completions/repetition_fraction"] == 0.5
    assert group_metrics([completed([9, *again, 4], again, reason="stop")])["completions/repetition_fraction"] == 1
    assert group_metrics([completed([9, *again, 4], [4, 9], reason="length")])["completions/repetition_fraction"] == 0


def test_a_loop_is_four_times_the_same_up_to_the_end_and_sixteen_tokens():
    long = list(range(1, 129))
    rows = {
        "one token, 16 times": ([7] * 16, True),
        "15 times": ([3] + [7] * 15, False),
        "two tokens, 8 times": ([9] + [7, 8] * 8, True),
        "five tokens, 4 times": ([9, 9] + [1, 2, 3, 4, 5] * 4, True),
        "nearly 4 times": ([2, 3, 4, 5] + [1, 2, 3, 4, 5] * 3, False),
        "the longest": (long * 4, True),
        "longer than that": ([*long, 129] * 5, False),
        "it ends otherwise": ([7] * 40 + [1], False),
        "nothing": ([], False),
        "fewer tokens than it takes": ([7] * 8, False),
    }
    found = end_in_loops([np.array(row, np.int32) for row, _ in rows.values()])
    assert found.tolist() == [wanted for _, wanted in rows.values()], list(rows)
    assert end_in_loops([]).shape == (0,)


def test_loops_are_what_a_search_through_all_periods_finds():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 2, rng.integers(1, 60)) for _ in range(400)]
    rows += [np.concatenate([row, np.tile(row[-5:], 4)]) for row in rows[:50]]

    def ends_in_a_loop(row):
        for period in range(1, 129):
            size = max(4 * period, 16)
            tail = row[-size:]
            if len(row) >= size and all(tail[i] == tail[i - period] for i in range(period, size)):
                return True
        return False

    wanted = [ends_in_a_loop(row.tolist()) for row in rows]
    assert 20 < sum(wanted) < 400
    assert end_in_loops(rows).tolist() == wanted


def test_quantiles_of_rewards_and_lengths_are_those_of_all_completions_together():
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 90, (3, 4))
    made = [completed(*(np.arange(size) for size in row)) for row in sizes]
    rewards = rng.normal(size=(3, 4))
    rewards[1, 2] = np.nan
    found = group_metrics([dataclasses.replace(one, rewards=row) for one, row in zip(made, rewards, strict=True)])
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        assert found[f"completions/length_{name}"] == pytest.approx(np.quantile(sizes, share))
        assert found[f"reward/{name}"] == pytest.approx(np.nanquantile(rewards, share))
    assert found["completions/length_p50"] == np.median(sizes)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "letters.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {c}", "answer": c}) + "\n" for c in "abcdefgh"))
    task = Task(Table(str(path)), extractor="whole", template="chatml")
    model, tokenizer = load_pretrained("tiny-random")
    engine = Engine(model, slots=4, max_length=64, chunk=4)
    quiet = lambda text: None
    with Scorer((Accuracy(),), 1) as scorer:
        source = GroupSource(tokenizer, Prompts(task, tokenizer), Shuffled(load(task).train, 7), scorer, 3, 7, ())
        admission = AdmissionPolicy(4, 4, LONGEST, False, Collect())
        yield model, Sampler(engine, source, Sampling(max_new_tokens=LONGEST), admission, quiet)


def needing(made, needed, collect=Collect(), **source):
    """The sampler for steps of another size."""
    admission = dataclasses.replace(made.admission, needed=needed, collect=collect)
    return dataclasses.replace(made, admission=admission, source=dataclasses.replace(made.source, **source))


@pytest.mark.slow
def test_groups_depend_on_their_place_in_the_stream_only(sampler):
    model, made = sampler
    together = collect_groups(made, model, 2, Carryover(5)).groups
    apart = [g for cursor in (5, 7) for g in collect_groups(needing(made, 2), model, 2, Carryover(cursor)).groups]
    assert [g.problem.id for g in together] == [g.problem.id for g in apart]
    for a, b in zip(together, apart, strict=True):
        for x, y in zip(a.completions, b.completions, strict=True):
            assert x.tokens.tobytes() == y.tokens.tobytes() and x.sampler_logp.tobytes() == y.sampler_logp.tobytes()
            assert x.text == y.text and x.version.tolist() == [2] * len(x.tokens)


def test_groups_hold_their_prompts_completions_and_scores(sampler):
    model, made = sampler
    found = collect_groups(made, model, 0, Carryover())
    assert len(found.groups) == 4 and {len(g.completions) for g in found.groups} == {3}
    for g in found.groups:
        assert g.rewards.shape == g.accuracy.shape == g.parts["accuracy"].shape == (3,)
        assert len({c.tokens.tobytes() for c in g.completions}) == 3
        assert g.problem.prompt[-1]["content"] in bytes(g.prompt[g.prompt < 256].astype(np.uint8)).decode()
        assert {c.text for c in g.completions} == set(
            made.source.tokenizer.batch_decode([c.tokens for c in g.completions], skip_special_tokens=True)
        )
    assert found.metrics["time/rollout_s"] > 0 and found.metrics["reward/errors"] == 0
    assert 0.5 < found.metrics["rollout/utilisation"] <= 1 and found.metrics["rollout/useful_fraction"] == 1


class Chunks:
    """The engine, and the number of chunks that it has sampled: so far, and when scores were first asked for."""

    def __init__(self, engine):
        self.engine, self.count, self.begun, self.more = engine, 0, [], threading.Condition()

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self, *weights):
        sampled = self.engine.step(*weights)
        with self.more:
            self.count += 1
            self.more.notify_all()
        return sampled

    def begin(self, items):
        self.begun.append(self.count)
        return self.scorer.begin(items)


def test_groups_are_scored_while_others_are_sampled(sampler):
    model, made = sampler
    engine, sampled = Chunks(made.engine), []

    def waits(problem, completion):
        with engine.more:  # until the chunk after the one in which its group ended
            sampled.append(engine.more.wait_for(lambda: engine.count > engine.begun[0], 30.0))
        return float(len(completion.text))

    with Scorer((waits,), timeout_s=60.0) as engine.scorer:
        source = dataclasses.replace(made.source, scorer=engine)
        found = collect_groups(dataclasses.replace(made, engine=engine, source=source), model, 0, Carryover())
    assert sampled == [True] * 12 and len(engine.begun) > 1
    wanted = collect_groups(made, model, 0, Carryover())
    for one, other in zip(found.groups, wanted.groups, strict=True):
        assert [c.text for c in one.completions] == [c.text for c in other.completions]
        assert one.rewards.tolist() == [len(c.text) for c in one.completions]
    assert found.metrics["reward/errors"] == 0 == found.metrics["reward/timeouts"]


def test_a_completion_that_is_handed_back_goes_on_as_if_it_had_never_been(sampler):
    model, made = sampler
    wanted, left = collect_groups(needing(made, 2), model, 0, Carryover()).groups, Carryover()
    short = needing(made, 2, Collect(token_budget=2))
    for version in (5, 6, 7):
        found = collect_groups(short, model, version, left)
        left = found.carryover
        assert len(found.groups) == (2 if version == 7 else 0)
    assert [g.problem.id for g in found.groups] == [g.problem.id for g in wanted]
    for a, b in zip(found.groups, wanted, strict=True):
        for x, y in zip(a.completions, b.completions, strict=True):
            assert x.tokens.tolist() == y.tokens.tolist() and x.text == y.text
            np.testing.assert_allclose(x.sampler_logp, y.sampler_logp, atol=1e-5)
            assert (
                x.version.tolist() == [5, 5, 6, 6, 7][: len(x.tokens)] and x.extras["entropy"].shape == x.tokens.shape
            )


def test_accuracy_is_the_share_of_what_is_verified():
    unverified = group([np.nan, np.nan], rewards=[0.5, 1.0])
    done = completed([1], [2]).completions
    share = lambda *groups: group_metrics([dataclasses.replace(g, completions=done) for g in groups])["reward/accuracy"]
    assert share(group([1, 0]), group([1, 1])) == 0.75
    assert np.isnan(share(unverified)) and share(unverified, group([1, 0])) == 0.5


def test_what_was_asked_is_scored_and_learned_from_whatever_changes_between_two_steps(sampler):
    model, made = sampler
    left = collect_groups(needing(made, 2, Collect(token_budget=2)), model, 5, Carryover()).carryover
    assert all(len(u.prompt) for u in left.unfinished) and len(left.unfinished) >= 2
    answers = [dataclasses.replace(p, id=f"edited {p.id}", answer=p.answer * 2) for p in made.source.stream.problems]
    task = dataclasses.replace(made.source.prompts.tasks[0], suffix=" Now.")
    edited = needing(made, 2, stream=Shuffled(answers[::-1], 7), prompts=Prompts(task, made.source.tokenizer))
    wanted = collect_groups(needing(made, 2), model, 5, Carryover()).groups
    for found, before in zip(collect_groups(edited, model, 5, left).groups, wanted, strict=True):
        assert found.problem == before.problem and found.prompt.tolist() == before.prompt.tolist()
        assert [c.tokens.tolist() for c in found.completions] == [c.tokens.tolist() for c in before.completions]
    assert collect_groups(edited, model, 5, Carryover()).groups[0].problem.id.startswith("edited")


def test_rewards_are_shaped_in_order_with_the_updates_and_the_budget_at_hand(sampler):
    model, made = sampler
    seen = []

    def note(name):
        def shape(group, updates, budget):
            seen.append((name, updates, budget))
            return dataclasses.replace(group, rewards=group.rewards * 2 + (name == "second"))

        return shape

    shaped = collect_groups(needing(made, 1, shaping=(note("first"), note("second"))), model, 7, Carryover()).groups
    plain = collect_groups(needing(made, 1), model, 7, Carryover()).groups
    assert seen == [("first", 7, LONGEST), ("second", 7, LONGEST)]
    np.testing.assert_array_equal(shaped[0].rewards, plain[0].rewards * 4 + 1)
