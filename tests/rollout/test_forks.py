"""Episodes in several rows: what the engine was fed is what the learner reads, and the loss sees one row."""

import dataclasses

import numpy as np
import pytest
from learner.rollouts import forward_on, one_device
from rollout.test_episodes import FORKS, RULES, completions, loaded, played

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.learner import Layout, pack, to_samples
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.rollout.evaluate import episode_metrics


@pytest.mark.slow
def test_where_the_template_rewrites_history_a_new_row_begins_and_the_loss_reads_one():
    """The learner's log-probabilities are the sampler's: each row is, token by token, what the engine was fed."""
    model, tokenizer = loaded()
    groups = played(limits=FORKS, rules=dataclasses.replace(RULES, max_new_tokens=180))
    ends = [one.episode.end for one in completions(groups)]
    assert ends.count("completed") == 4 and ends.count("context_overflow") == 1, "what is written anew may be longer"
    assert episode_metrics(groups)["episode/forks"] == 5 / 6 and episode_metrics(played())["episode/forks"] == 0
    for group in groups:
        for one in group.completions:
            turns = one.episode.turns
            if one.episode.end == "context_overflow":
                assert len(turns) == 2 and not one.forks
                continue
            [(start, given)] = one.forks.items()
            assert one.last_turn == start == turns[1].end and one.mask[start:].all() and not one.mask.all()
            texts = [group.prompt, one.tokens[:start], given]
            asked, begun, now = (tokenizer.decode(x.tolist(), skip_special_tokens=False) for x in texts)
            assert asked[0] == "0" and now[0] == "1" and turns[1].messages[0]["content"] in now
            assert now.startswith(asked[1:], 1) and turns[1].messages[0]["content"] not in begun
    algorithm = PRESETS["grpo"]
    samples, _ = to_samples(algorithm, groups, 4, np.array([[1.0, 0.0, 0.0]] * 2), (), 260, {})
    flat = [sample for members in samples for sample in members]
    layout = Layout(2, 512, 260)
    assert pack(flat, layout).counts["policy"].sequences == 6
    forward = dataclasses.replace(forward_on(one_device(), layout, ComputeOptions()), temperature=RULES.temperature)
    for found, sample in zip(forward.by_sample(model, flat), flat, strict=True):
        np.testing.assert_allclose(found[sample.mask], sample.arrays["sampler_logp"][sample.mask], atol=1e-5)
