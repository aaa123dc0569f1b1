"""Instructions are followed or not, at the edges of each; what cannot be checked is refused; what is drawn can be."""

import dataclasses
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.config import Scoring, from_json, load_config, to_json, validate
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, accuracy
from jaxrl_llm.rewards.scorer import Scorer
from jaxrl_llm.tasks import Instructions, Rows, Table, Task, load
from jaxrl_llm.tasks.instructions import (
    CHECKS,
    CONFLICTS,
    ENDINGS,
    KEYWORDS,
    KINDS,
    OPENINGS,
    RARE,
    REQUESTS,
    TOPICS,
    followed,
)
from jaxrl_llm.types import Completion, Problem


def completion(text):
    return Completion(np.zeros(3, np.int32), np.zeros(3), "stop", np.ones(3, bool), np.zeros(3, np.int32), text=text)


def asked(*instructions, **fields):
    """A problem with these (id, arguments)."""
    names, arguments = [name for name, _ in instructions], [given for _, given in instructions]
    metadata = {"instruction_id_list": names, "kwargs": arguments}
    prompt = ({"role": "user", "content": "?"},)
    return Problem("1", prompt, "", "t", "whole", "instructions", metadata | fields)


def score(text, *instructions):
    return accuracy(asked(*instructions), completion(text))


WORDS, LETTERS, TIMES = "length_constraints:number_words", "keywords:letter_frequency", "keywords:frequency"
PARAGRAPHS, NTH = "length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word"
CAPITALS = "change_case:capital_word_frequency"
THIRD = {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Paper"}
CASES = {
    "keywords:existence": [
        ({"keywords": ["rock", "C++ (new)"]}, ["Rockets in c++ (NEW)"], ["rock", "c++ (new)", "rock and cpp (new)"]),
        ({"keywords": ["a.c"]}, ["a.c"], ["abc"]),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["rock", "C++"]}, ["rocket", "unrock", "c+ +"], ["ROCK!", "a-rock", "in c++."]),
    ],
    TIMES: [
        ({"keyword": " war ", "frequency": 2, "relation": "at least"}, ["War, warm", "war war war"], ["war", "raw"]),
        ({"keyword": "war", "frequency": 2, "relation": "less than"}, ["war", "peace"], ["war WAR"]),
        ({"keyword": "aa", "frequency": 2, "relation": "at least"}, ["aaaa"], ["aaa"]),
    ],
    LETTERS: [
        ({"letter": "E", "let_frequency": 3, "let_relation": "at least"}, ["eEe", "three eels"], ["ee", "no"]),
        ({"letter": "!", "let_frequency": 1, "let_relation": "less than"}, ["."], ["!"]),
    ],
    WORDS: [
        ({"num_words": 3, "relation": "at least"}, ["a b c", "a, b-c", "don't go"], ["a b", "a, b - !"]),
        ({"num_words": 3, "relation": "less than"}, ["a b", "!"], ["a b c"]),
    ],
    PARAGRAPHS: [
        ({"num_paragraphs": 2}, ["a***b", "a\n\n***\nb\n***", "***a\n***b"], ["a", "a***b***c", "a\n\nb", "a******b"]),
        ({"num_paragraphs": 1}, ["a", "***a***"], ["a***b", "***"]),
    ],
    NTH: [
        (THIRD, ["a\n\n\"PAPER, b\n\nc", "a\n\n 'paper' x\n\nc"], ["paper", "paper\n\nb\n\nc", "a\n\npapers\n\nc"]),
        (THIRD, ["a\n\npaper\n\nc\n\n"], ["a\n\npaper\n\nc\n\nd", "a\n\n\n\npaper\n\nc", "a\npaper\nc"]),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, ["[a] [b c]", "[a][b][c]", "[[a]] [ [b]"], ["[a]", "[a", "a] [b", "[a\n] [b]"]),
        ({"num_placeholders": 0}, ["none"], []),
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, ["x\nP.S. y", "p. s. y", "x p.s.y"], ["PS y", "p.s", "post"]),
        ({"postscript_marker": "P.P.S"}, ["P.P.S more", "p. p. s."], ["p.s. more"]),
        ({"postscript_marker": "N.B. (1)"}, ["n.b. (1)"], ["nxbx 1"]),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, ["* a\n* b", "x\n  - a\n*b\ny", "* a\n**b**\n-"], ["* a", "* a\n* b\n* c", "a * b\n- c"]),
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, ["*a* *b*", "**a** and *b c*", "*a*b*c*"], ["*a*", "**a**", "* a\nb* *c*", "** **"]),
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "Section", "num_sections": 2}, ["Section 1 a Section2"], ["Section 1", "section 1, 2"]),
        ({"section_spliter": "S.", "num_sections": 1}, ["S. 1"], ["Sx 1", "S. one"]),
    ],
    "detectable_format:title": [
        ({}, ["<<a>>", "x <<a b>> y", "<< a > b >>"], ["<<>>", "<< >>", "<<a>", ">>a<<", "<<a\n>>"]),
    ],
    "detectable_format:json_format": [
        ({}, ['{"a": 1}', '```json\n[1]\n```', '```\n{}```', '"text"'], ["{a: 1}", "{} done", "```python\n{}```", "["]),
    ],
    "detectable_format:constrained_response": [
        ({}, ["My answer is yes.", "So: My answer is maybe. Or?"], ["my answer is yes.", "My answer is yes", "yes"]),
    ],
    "combination:two_responses": [
        ({}, ["a******b", "******a\n******\nb"], ["a", "a******a", "a******b******c", "a************b", "a***b"]),
    ],
    "combination:repeat_prompt": [({"prompt_to_repeat": " Say It. "}, ["say it. No."], ["So: say it.", "Say it"])],
    "startend:end_checker": [({"end_phrase": "The End."}, ["x the end.", '"x The end."\n'], ["The end", "the end. x"])],
    "startend:quotation": [({}, ['"a"', '""', ' "a" "b" '], ['"', '"a', 'a"', "'a'", "\u201ca\u201d"])],
    "change_case:english_capital": [({}, ["ALL 1!", "\u00c4"], ["ALl", "1!"])],
    "change_case:english_lowercase": [({}, ["all 1!", "\u00e4"], ["All", "1!"])],
    CAPITALS: [
        ({"capital_frequency": 2, "capital_relation": "at least"}, ["I AM", "U.S. and AND/OR"], ["DO-IT it", "Us ME"]),
        ({"capital_frequency": 2, "capital_relation": "less than"}, ["DON'T", "none", "COVID-19"], ["A, B"]),
    ],
    "punctuation:no_comma": [({}, ["a; b"], ["a, b", "1,000"])],
}  # fmt: skip


def test_every_check_has_cases():
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_or_do_not(name):
    for arguments, right, wrong in CASES[name]:
        for text in right:
            assert score(text, (name, arguments)) == 1.0, text
        for text in ("", " \n", *wrong):
            assert score(text, (name, arguments)) == 0.0, text


@pytest.mark.parametrize("name", CASES)
def test_each_check_is_linear_in_what_a_model_may_write(name):
    arguments = CASES[name][0][0]
    longest = 0.0
    for piece in ("[", "<<", "*", "* ", "**a ", "\n", " ", '"', "p.", "a", "P. S", "Section ", "{", "-\n", "<<a", "A."):
        begin = time.process_time()
        score("x" + piece * (60_000 // len(piece)) + "x", (name, arguments))
        longest = max(longest, time.process_time() - begin)
    assert longest < 1.0  # what is quadratic takes several seconds


def test_the_score_is_the_share_and_none_of_an_empty_text():
    three = (
        ("punctuation:no_comma", {}),
        (WORDS, {"num_words": 2, "relation": "at least"}),
        ("startend:quotation", None),
    )
    assert score('"a b"', *three) == 1.0
    assert score("a b", *three) == pytest.approx(2 / 3) and score("a,", *three) == 0.0
    assert score("", *three) == score("  ", *three) == 0.0  # though an empty text has no comma
    problem = dataclasses.replace(asked(*three), extractor="tag:out")
    assert accuracy(problem, completion('Well, <out>"a b"</out>')) == 1.0
    with Scorer((Accuracy(weight=2.0),)) as scorer:
        scores = scorer.score([(problem, completion(f"<out>{text}</out>")) for text in ('"a b"', "a b", ",")])
    assert scores.reward.tolist() == pytest.approx([2.0, 4 / 3, 0.0]) and scores.accuracy[0] == 1.0


@given(st.lists(st.text("abcXYZ019", min_size=1), min_size=1), st.integers(0, 12), st.sampled_from("b1X"))
def test_at_least_and_less_than_are_opposites_and_count_as_python_does(words, bound, letter):
    letters = sum(character.lower() == letter.lower() for word in words for character in word)
    for name, fixed, count_field, relation_field, count in (
        (WORDS, {}, "num_words", "relation", len(words)),
        (LETTERS, {"letter": letter}, "let_frequency", "let_relation", letters),
        (CAPITALS, {}, "capital_frequency", "capital_relation", sum(map(str.isupper, words))),
    ):
        for relation, right in (("at least", count >= bound), ("less than", count < bound)):
            given = {count_field: bound, relation_field: relation}
            assert score("; ".join(words), (name, fixed | given)) == float(right)


def table(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task(Table(str(path)), extractor="whole", verifier="instructions")


def test_rows_of_the_hub_need_no_answer_and_nones_are_not_there(tmp_path):
    none = {"num_words": None, "keywords": None, "relation": None}
    row = {"key": 1000, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma", WORDS]}
    row["kwargs"] = [none, none | {"num_words": 2, "relation": "at least"}]
    task = table(tmp_path, row, row | {"prompt": "b"})
    for source in (task.source, Rows([row]), dataclasses.replace(task.source, answer_field=None)):
        loaded = load(dataclasses.replace(task, source=source))
        assert not loaded.notes and loaded.train[0].verifier == "instructions"
        assert accuracy(loaded.train[0], completion("one two")) == 1.0
        assert accuracy(loaded.train[0], completion("one")) == 0.5


ROW = {"prompt": "a", "instruction_id_list": [WORDS], "kwargs": [{"num_words": 2, "relation": "at least"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_id_list": None}, "needs the fields instruction_id_list, a list of ids, and kwargs"),
        ({"instruction_id_list": [], "kwargs": []}, "needs the fields instruction_id_list"),
        ({"kwargs": [{}, {}]}, "needs the fields instruction_id_list"),
        ({"instruction_id_list": WORDS}, "needs the fields instruction_id_list"),
        ({"instruction_id_list": [WORDS[:-1]]}, f"'{WORDS[:-1]}' is unknown; did you mean {WORDS}?"),
        ({"instruction_id_list": ["zzz"]}, "'zzz' is unknown; choose of keywords:existence, keywords:forbidden_words,"),
        ({"instruction_id_list": [3]}, "instruction 3 is unknown"),
        (
            {"instruction_id_list": ["language:response_language"]},
            "language:response_language takes a model or a splitter of sentences, and is not checked here; leave such "
            "rows out with keep='jaxrl_llm.tasks.filters:checkable_instructions'",
        ),
        ({"kwargs": ["many"]}, f"instruction {WORDS} has 'many' for arguments, which are an object with names; corr"),
        ({"kwargs": [{"num_words": 2}]}, "lacks the argument relation, 'at least' or 'less than'; correct the row"),
        ({"kwargs": [{"num_words": None, "relation": "at least"}]}, ""),
        ({"kwargs": [{"num_words": "2", "relation": "at least"}]}, "has num_words '2', which is not a whole number"),
        ({"kwargs": [{"num_words": True, "relation": "at least"}]}, "has num_words True, which is not a whole number"),
        ({"kwargs": [{"num_words": -1, "relation": "at least"}]}, "has num_words -1, which is not a whole"),
        ({"kwargs": [{"num_words": 2, "relation": "at most"}]}, "has relation 'at most', which is not 'at least' or"),
        ({"kwargs": [{"num_word": 2, "relation": "at least"}]}, "has no argument 'num_word'; did you mean num_words?"),
        ({"instruction_id_list": ["startend:quotation"]}, "has no argument 'num_words'; it has none; correct the row"),
        ({"instruction_id_list": [NTH], "kwargs": [THIRD | {"nth_paragraph": 4}]}, "speaks of paragraph 4 of 3; corr"),
        ({"instruction_id_list": [NTH], "kwargs": [THIRD | {"nth_paragraph": 0}]}, "not a whole number from 1 on"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "a"}]}, "is not a list of texts"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "which is not a list of texts"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_refused_at_loading_with_its_row(change, message, tmp_path):
    assert load(table(tmp_path, ROW)).train[0].verifier == "instructions"
    with pytest.raises(InputError) as error:
        load(table(tmp_path, ROW, ROW | {"prompt": "b"} | change))
    said = str(error.value)
    assert f"{tmp_path}/rows.jsonl:2: " in said and message in said and "\n" not in said


def test_rows_with_other_instructions_can_be_left_out(tmp_path):
    other = ROW | {"prompt": "b", "instruction_id_list": ["length_constraints:number_sentences"]}
    task = dataclasses.replace(table(tmp_path, ROW, other), keep="jaxrl_llm.tasks.filters:checkable_instructions")
    loaded = load(task)
    assert len(loaded.train) == 1 and loaded.notes[0].startswith("1 of 2 dropped by jaxrl_llm.tasks.filters:checkable")


@pytest.mark.parametrize("extractor", ["last_number", "boxed"])
def test_a_piece_of_the_text_is_not_looked_at(extractor, tmp_path):
    with pytest.raises(
        InputError, match=f"of which extractor '{extractor}' leaves a piece: set extractor whole, tag:NAME or after:TAG"
    ):
        load(dataclasses.replace(table(tmp_path, ROW), extractor=extractor))


def written(problem):
    """A text that follows what the generator asks for, put together from its arguments."""
    wants = dict(zip(problem.metadata["instruction_id_list"], problem.metadata["kwargs"], strict=True))
    few = {name: given for name, given in wants.items() if "less than" in given.values()}
    many = {name: given for name, given in wants.items() if name not in few}
    get = lambda name: many.get(next((known for known in many if known.endswith(f":{name}")), None))
    said = ["<<x>>" if "detectable_format:title" in many else "so"]
    said += (get("existence") or {}).get("keywords", [])
    said += [given["keyword"]] * given["frequency"] if (given := get("frequency")) else []
    said += [given["letter"] * given["let_frequency"]] if (given := get("letter_frequency")) else []
    said += ["hm"] * given["num_words"] if (given := get("number_words")) else []
    said += ["UP"] * given["capital_frequency"] if (given := get("capital_word_frequency")) else []
    said += ["[name]"] * given["num_placeholders"] if (given := get("number_placeholders")) else []
    said += [f"{given['postscript_marker'].lower()} more"] if (given := get("postscript")) else []
    body = " ".join(said)
    more = lambda count: range(2, count + 1)
    if given := get("number_paragraphs"):
        body += "".join(f"\n***\nand {'m' * n}" for n in more(given["num_paragraphs"]))
    if given := get("nth_paragraph_first_word"):
        body = "\n\n".join([f"{given['first_word']} {body}"] + [given["first_word"]] * (given["num_paragraphs"] - 1))
    if given := get("number_bullet_lists"):
        body += "\n* so" * given["num_bullets"]
    if given := get("number_highlighted_sections"):
        body += " *so*" * given["num_highlights"]
    if given := get("multiple_sections"):
        body = "".join(f"{given['section_spliter']} {n} so\n" for n in range(1, given["num_sections"] + 1)) + body
    if get("two_responses") is not None:
        body += "\n******\nno"
    if given := get("repeat_prompt"):
        body = f"{given['prompt_to_repeat']} {body}"
    body += " My answer is no." if get("constrained_response") is not None else ""
    body += f" {given['end_phrase']}" if (given := get("end_checker")) else ""
    if get("json_format") is not None:
        body = json.dumps({"a": body})
    body = f'"{body}"' if get("quotation") is not None else body
    body = body.lower() if get("english_lowercase") is not None else body
    return body.upper() if get("english_capital") is not None else body


def test_what_is_drawn_can_be_followed():
    problems = list(Instructions(seed=1, size=3000).problems())
    seen = {name for problem in problems for name in problem.metadata["instruction_id_list"]}
    assert seen == KINDS.keys() == CHECKS.keys()
    assert {len(problem.metadata["kwargs"]) for problem in problems} == {1, 2, 3}
    for problem in load(Task(Instructions(seed=1, size=3000), extractor="whole", verifier="instructions")).train:
        text = written(problem)
        assert accuracy(problem, completion(text)) == 1.0, (problem.prompt, problem.metadata, text)
        assert followed(text, problem.metadata) == [True] * len(problem.metadata["kwargs"])


def test_what_is_thought_is_not_judged():
    task = Task(Instructions(seed=1, size=100), extractor="after:</think>", verifier="instructions")
    for problem in load(task).train:
        answer = written(problem)
        for thought in ("", "Hm, 1, 2.\n\n***\n\nP.S. - <<no>> [x] ", "<think>" + answer.swapcase()):
            assert accuracy(problem, completion(f"{thought}</think>\n\n{answer}")) == 1.0
        assert accuracy(problem, completion(answer)) == 0.0, "its thoughts have no end"


def test_characters_are_counted_as_they_are_written():
    fields = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    asked = Problem("1", ({"role": "user", "content": "?"},), "", "t", "whole", "instructions", fields)
    assert accuracy(asked, completion("一，二")) == 1.0 and accuracy(asked, completion("1, 2")) == 0.0


def test_the_prompt_says_what_is_checked():
    for problem in Instructions(size=300).problems():
        said = problem.prompt[0]["content"]
        for arguments in problem.metadata["kwargs"]:
            for value in arguments.values():
                assert all(str(one) in said for one in (value if isinstance(value, list) else [value]))


def test_what_prompts_repeat_leaves_out_what_may_be_forbidden():
    fixed = " ".join([*REQUESTS, *TOPICS, *OPENINGS, *ENDINGS]).lower()
    assert not [word for word in KEYWORDS if word in fixed] and len(set(KEYWORDS)) == len(KEYWORDS)
    assert not set(RARE + ",") & set(fixed + " ".join(KEYWORDS))
    assert all(len({KINDS[name][0] for name in pair}) == 2 for pair in CONFLICTS)


def test_equal_settings_give_equal_problems_and_others_give_others():
    first, again, other = (list(Instructions(seed, 50).problems()) for seed in (3, 3, 4))
    assert first == again and [problem.id for problem in first] != [problem.id for problem in other]
    assert list(Instructions(3, 20).problems()) == first[:20]
    assert first[0].prompt[0]["content"] == (
        'Tell me about a small island. End with "That is all." and nothing after it. Write at least 20 words. Make 4 '
        "parts, and begin each with Section and its number."
    )
    only = list(Instructions(kinds=("punctuation:no_comma", WORDS), size=50).problems())
    assert {name for p in only for name in p.metadata["instruction_id_list"]} == {"punctuation:no_comma", WORDS}


def test_a_run_takes_the_source_and_rows_without_answers():
    task = Task(Instructions(seed=2, kinds=("punctuation:no_comma",)), extractor="whole", verifier="instructions")
    run = dataclasses.replace(load_config("smoke")[1], task=task, scoring=Scoring((Accuracy(),)))
    validate(run)
    assert from_json(json.loads(json.dumps(to_json(run)))) == run
    validate(dataclasses.replace(run, task=dataclasses.replace(task, source=Table("a.jsonl", answer_field=None))))


def test_unknown_kinds_are_refused():
    task = Task(Instructions(kinds=("punctuation:no_coma",)), extractor="whole", verifier="instructions")
    with pytest.raises(InputError, match=r"no kind 'punctuation:no_coma'; did you mean punctuation:no_comma?"):
        load(task)
    with pytest.raises(InputError, match="has size 0; give at least 1"):
        load(dataclasses.replace(task, source=Instructions(size=0)))
