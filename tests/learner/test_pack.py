"""Packing: whatever the lengths, each completion can be read back from the rows, once, behind its own prompt."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner.rollouts import sample

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, pack
from jaxrl_llm.learner.batch import sample_rows

T, S = 5, 14


@st.composite
def batches(draw, forks=0.0):
    """Samples in groups; each advantage is the sample's number. A new row begins at so many tokens."""
    samples = []
    for prompt in range(draw(st.integers(1, 5))):
        tokens = np.full(draw(st.integers(1, S - T)), prompt + 1, np.int32)
        for _ in range(draw(st.integers(1, 6))):
            size, number = draw(st.integers(1, T)), len(samples)
            random = np.random.default_rng(number)
            counted = random.random(size) < draw(st.sampled_from([0.0, 0.7, 1.1]))
            logp, answer = random.normal(size=size).astype(np.float32), random.integers(10, 99, size).astype(np.int32)
            made = sample(tokens, answer, counted, logp, float(number), random.random(size) < 0.5)
            starts = [at for at in range(1, size) if random.random() < forks]
            read = {at: random.integers(100, 999, random.integers(1, S - T)).astype(np.int32) for at in starts}
            samples.append(dataclasses.replace(made, forks=read))
    return samples


def read_back(packed, m):
    """The samples of microbatch m by number, each token found by what the model sees when it predicts it."""
    rows = [np.asarray(x[m]) for x in packed.rows]
    width = packed.mask.shape[2]
    found = collections.defaultdict(dict)
    part = len(rows[0]) // len(packed.predictions.source[m])
    for (p, n), place in np.ndenumerate(packed.predictions.scatter[m]):
        if place == packed.mask[m].size:
            continue
        source, target = (
            packed.predictions.source[m, p, n] + p * part * rows[0].shape[1],
            packed.predictions.target[m, p, n],
        )
        assert source // rows[0].shape[1] // part == p
        (b, t), (r, column) = divmod(int(place), width), divmod(int(source), rows[0].shape[1])
        tokens, positions, group, branch = (x[r, : column + 1] for x in rows)
        seen = (group == group[-1]) & (group > 0) & ((branch == 0) | (branch == branch[-1]))
        assert positions[seen].tolist() == list(range(seen.sum()))
        assert t not in found[b]
        found[b][t] = (tokens[seen].tolist(), int(target))
    return found


@settings(max_examples=60, deadline=None)
@given(st.one_of(batches(), batches(0.3)), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_every_completion_is_there_once_behind_its_prompt(samples, rows, parts, share):
    rows = T if any(one.forks for one in samples) else rows
    layout = Layout(rows * parts, S, T, parts, share)
    packed = pack(samples, layout)
    numbers = []
    for m in range(len(packed.mask)):
        found = read_back(packed, m)
        assert (len(found) > 0) == (m < packed.microbatches)
        for b, tokens in found.items():
            one = samples[int(packed.by_sequence["advantages"][m, b])]
            numbers.append(int(packed.by_sequence["advantages"][m, b]))
            assert sorted(tokens) == list(range(len(one.tokens)))
            for t, (seen, target) in tokens.items():
                assert target == one.tokens[t]
                begun = max((at for at in one.forks if at <= t), default=0)
                assert seen == [*one.forks.get(begun, one.prompt), *one.tokens[begun:t]]
            count = len(tokens)
            np.testing.assert_array_equal(packed.mask[m, b], np.append(one.mask, np.zeros(T - count, bool)))
            for name in ("sampler_logp", "fresh"):
                np.testing.assert_array_equal(packed.by_token[name][m, b, :count], one.arrays[name])
                assert not packed.by_token[name][m, b, count:].any()
        unused = [b for b in range(packed.mask.shape[1]) if b not in found]
        assert not packed.mask[m, unused].any()
    assert sorted(numbers) == list(range(len(samples)))
    for number, (m, b) in enumerate(sample_rows(samples, layout)):
        assert packed.by_sequence["advantages"][m, b] == number
    assert packed.counts["policy"].tokens == sum(s.mask.sum() for s in samples)
    assert packed.counts["policy"].sequences == sum(s.mask.any() for s in samples)


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(1, 3))
def test_a_prompt_stands_once_in_a_row(samples, rows):
    packed = pack(samples, Layout(rows, S, T))
    for m in range(len(packed.mask)):
        for tokens, group, branch in zip(
            packed.rows.tokens[m], packed.rows.group[m], packed.rows.branch[m], strict=True
        ):
            prompts = [tuple(tokens[(group == g) & (branch == 0)]) for g in set(group[group > 0])]
            assert len(prompts) == len(set(prompts)) and all(prompts)
            assert not tokens[group == 0].any()


def test_a_group_that_fits_costs_its_prompt_once():
    prompt = np.arange(1, 7, dtype=np.int32)
    samples = [
        sample(prompt, np.full(2, i + 20, np.int32), np.ones(2, bool), np.zeros(2, np.float32), 0.0) for i in range(4)
    ]
    packed = pack(samples, Layout(1, S, T))
    assert packed.microbatches == 1 and (packed.rows.group > 0).sum() == 6 + 4 * 2


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(1, 3))
def test_completions_with_prompts_of_their_own_are_segments(samples, rows):
    packed = pack(samples, Layout(rows, S, T, share_prompts=False))
    assert (packed.rows.group > 0).sum() == sum(len(s.prompt) + len(s.tokens) for s in samples)
    assert packed.rows.branch.max() == 1 and packed.rows.group.max(axis=-1).sum() == len(samples)


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_shapes_are_few(samples, rows, microbatches, sequences):
    packed = pack(samples, Layout(rows, S, T, microbatches=microbatches, sequences=sequences))
    for size, least in zip(packed.mask.shape, (microbatches, sequences), strict=False):
        assert size % least == 0 and (size // least).bit_count() == 1
    assert packed.mask.shape[2] == T and packed.rows.tokens.shape == (len(packed.mask), rows, S)
    assert packed.predictions.source.shape[2] in (-(-rows * S // 2), rows * S)
    assert len(packed.mask) == microbatches or len(packed.mask) < 2 * packed.microbatches


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(1, 3))
def test_shorter_completions_have_the_shapes_of_the_longest(samples, rows):
    longest = [dataclasses.replace(one, tokens=np.zeros(T, np.int32), forks={}) for one in samples]
    layout = Layout(rows, S, T).with_room(longest)
    assert pack(samples, layout).mask.shape == (layout.microbatches, len(samples), T)


def test_room_for_all_completions_is_bounded_by_bytes():
    samples = [sample(np.ones(3, np.int32), np.zeros(T, np.int32), np.ones(T, bool), np.zeros(T, np.float32), 0.0)] * 9
    layout = Layout(1, 3 + 3 * T, T).with_room(samples)
    assert (layout.microbatches, layout.sequences) == (3, 9)
    for most, sequences in ((7, 7), (2, 3)):
        assert Layout(1, 3 + 3 * T, T).with_room(samples, room=most * 4 * 3 * T).sequences == sequences


def test_the_longest_that_fits_and_one_more():
    longest = sample(np.ones(S - T), np.arange(T, dtype=np.int32), np.ones(T, bool), np.zeros(T, np.float32), 1.0)
    packed = pack([longest], Layout(1, S, T))
    assert (packed.rows.group == 1).all() and packed.mask[0, 0].all()
    with pytest.raises(
        InputError, match=r"a prompt of 10 and a completion of 5 tokens exceed learner.compute.row_tokens 14"
    ):
        pack([dataclasses.replace(longest, prompt=np.ones(S - T + 1, np.int32))], Layout(1, S, T))


def test_prompts_of_equal_tokens_with_other_arrays_are_two():
    one = sample([1, 2, 3], np.full(2, 9, np.int32), np.ones(2, bool), np.zeros(2, np.float32), 0.0)
    seen = [
        dataclasses.replace(
            one,
            scalars={"advantages": value},
            arrays=one.arrays | {"image": np.full(2, value, np.float32)},
            prompt_arrays={"image": np.full(3, value, np.float32)},
        )
        for value in (1.0, 2.0, 1.0)
    ]
    packed = pack(seen, Layout(2, S, T))
    rows = packed.rows
    for r, group, branch in {(r, rows.group[0, r, c], rows.branch[0, r, c]) for r, c in np.argwhere(rows.branch[0])}:
        read = (rows.group[0, r] == group) & ((rows.branch[0, r] == 0) | (rows.branch[0, r] == branch))
        assert read.sum() == 5 and len(set(packed.by_column["image"][0, r][read])) == 1
    held = packed.by_column["image"][0][(rows.group[0] > 0) & (rows.branch[0] == 0)]
    assert sorted(held.tolist()) == [1.0] * 3 + [2.0] * 3, "the two that are one share it"
