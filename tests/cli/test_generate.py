"""``generate`` on a terminal: a chat that knows what was said, and text that appears as it is sampled."""

import contextlib
import dataclasses
import io
import itertools

import jax
import numpy as np
import pytest
from commands import MAIN
from terminals import CTRL_C, Terminal
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.cli.asking import load_policy
from jaxrl_llm.cli.generate import (
    FORGOTTEN,
    GREETING,
    HELP,
    answer_chat,
    encode_chat,
    fit_context,
    print_answer,
    printable,
    prompt_wording,
    stable_text,
    take_turn,
)
from jaxrl_llm.config import load_config
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rollout import Engine
from jaxrl_llm.types import Completion

HELLO = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "and again"}
GREEDY = Sampling(0.0, max_new_tokens=40)
CTRL_D = b"\x04"
CUT = "cut off after 40 tokens: --max_new_tokens allows no more"


class Screen(io.StringIO):
    """A terminal's output, piece by piece."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def isatty(self):
        return True

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny-random", None)


@pytest.fixture(scope="module")
def task(policy):
    return prompt_wording(policy, None)


def expected(policy, messages, sampling=GREEDY, seed=0):
    """What the model says after all these messages, as their whole text is given to a sampler at once."""
    text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    prompt = policy.tokenizer(f"{text}<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    with jax.set_mesh(policy.mesh):
        done = Engine(policy.model, 1, 256, mesh=policy.mesh).generate(policy.model, [prompt], [seed], sampling)[0]
    return text_of(policy.tokenizer, done.tokens, policy.model.config.tokens.eos)


def spelled(*words):
    """A tokenizer of bytes as tokens of their own (as Llama 2 has them) and words, that takes spaces away."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + list(words)
    plain = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, [], byte_fallback=True))
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    clean = ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    return PreTrainedTokenizerFast(tokenizer_object=plain, **dict.fromkeys(clean, True))


WORDS = ("▁do", "▁n", "'t", "t", "▁", ".", "'", "s", "▁I", "a")


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), spelled(*WORDS)], ids=["bytes within words", "bytes apart"])
def test_what_is_told_stays_whatever_follows(tokenizer):
    random = np.random.default_rng(0)
    text = list("Größe 東京 🙂🙂 don't".encode())
    for trial in range(300):
        tokens = random.integers((0, 0, 256)[trial % 3], len(tokenizer), 12)
        if trial % 3 == 0:  # whole characters, with a byte here and there that is part of none
            start = int(random.integers(0, len(text) - 12))
            tokens[:] = text[start : start + 12]
            tokens[random.integers(0, 12)] = 0xE2
        whole = text_of(tokenizer, tokens)
        told = [stable_text(tokens[:count], tokenizer) for count in range(13)]
        assert all(whole.startswith(text) for text in told)
        assert all(len(a) <= len(b) for a, b in itertools.pairwise(told))


def test_a_character_appears_once_all_its_bytes_are_there():
    tokens = tiny_tokenizer()("Zoë is 🙂, or so.")["input_ids"]
    told = [stable_text(tokens[:count], tiny_tokenizer()) for count in range(len(tokens) + 1)]
    assert not any("\ufffd" in text for text in told) and told[-1] == "Zoë is 🙂, or so."
    assert "Zoë" in told and told.index("Zoë") == 4


@pytest.mark.slow
def test_an_answer_appears_in_pieces_and_is_the_one_of_its_seed(policy, task):
    sampling = Sampling(0.7, max_new_tokens=60)
    screen = Screen()
    with contextlib.redirect_stdout(screen):
        done = print_answer(policy, encode_chat(policy, [HELLO], task), 3, sampling)
    assert done.text == expected(policy, [HELLO], sampling, 3) != expected(policy, [HELLO], sampling, 4)
    assert screen.getvalue() == printable(done.text) + "\n"
    assert len([piece for piece in screen.pieces if piece.strip()]) >= 3


def test_each_answer_follows_from_all_that_was_said(policy, task, capsys):
    first = expected(policy, [HELLO])
    chat = take_turn(policy, [HELLO], task, GREEDY, 0)
    assert chat == (HELLO, {"role": "assistant", "content": first})
    second = expected(policy, [*chat, AGAIN])
    assert take_turn(policy, [*chat, AGAIN], task, GREEDY, 0) == (
        *chat,
        AGAIN,
        {"role": "assistant", "content": second},
    )
    assert second != expected(policy, [AGAIN])
    said = capsys.readouterr()
    assert said.out == f"{first}\n{second}\n"
    assert said.err.splitlines() == [CUT] * 2


@pytest.mark.slow
def test_the_runs_own_wording_holds_for_every_message(policy):
    task = prompt_wording(policy, "Be brief.")
    task = task.__class__(task.source, template="chatml", system="Be brief.", suffix="!")
    chat = take_turn(policy, [HELLO], task, GREEDY, 0)
    chat = take_turn(policy, [*chat, AGAIN], task, GREEDY, 0)
    assert [one["content"] for one in chat[::2]] == ["Be brief.", chat[2]["content"], chat[4]["content"]]
    assert [one["content"] for one in chat if one["role"] == "user"] == ["hello!", "and again!"]
    assert [one["role"] for one in chat] == ["system", "user", "assistant", "user", "assistant"]


def spoken(policy, texts, prompts, reason="stop"):
    """A model that says these texts, one after the other, and notes what it is asked."""
    left = iter(texts)

    def speak(prompt):
        prompts.append(policy.tokenizer.decode(prompt))
        text = next(left)
        tokens = np.asarray([*policy.tokenizer(text, add_special_tokens=False)["input_ids"], 257], np.int32)
        return Completion(tokens, np.zeros(len(tokens)), reason, tokens > -1, tokens * 0, text=text)

    return speak


CALL = 'Wait.\n<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
MULTIPLY = ("jaxrl_llm.environments.examples:multiply",)


def test_calls_are_run_until_an_answer_calls_nothing(policy, capsys):
    task = prompt_wording(policy, None, MULTIPLY)
    prompts = []
    said, last = answer_chat(policy, [HELLO], task, spoken(policy, [CALL, "It is 42."], prompts))
    assert [one["role"] for one in said] == ["assistant", "tool", "assistant"] and last.text == "It is 42."
    assert said[1]["content"] == "42" and "multiply: 42" in capsys.readouterr().err.splitlines()
    assert "Multiply two" in prompts[0] and prompts[1].startswith(prompts[0] + CALL)
    assert "<tool_response>42</tool_response>" in prompts[1].removeprefix(prompts[0])
    more = fit_context(policy, [HELLO, *said, AGAIN], task, 40)[1]
    assert more == [HELLO, *said, AGAIN], "calls and results stay in the chat"
    long = [{"role": "user", "content": "x" * 700}, *said, AGAIN]
    assert fit_context(policy, long, task, 40)[1] == [AGAIN], "a turn is forgotten with its calls"


def test_an_answer_that_is_cut_off_calls_nothing(policy, capsys):
    task = prompt_wording(policy, None, MULTIPLY)
    said, _ = answer_chat(policy, [HELLO], task, spoken(policy, [CALL], [], "length"))
    assert [one["role"] for one in said] == ["assistant"] and not capsys.readouterr().err


def test_tools_are_those_of_the_run_unless_others_are_given(policy):
    run = dataclasses.replace(load_config("calculator_quickstart")[1])
    of_run = dataclasses.replace(policy, run=run)
    assert (
        prompt_wording(of_run, None).tools == run.task.tools
        and prompt_wording(of_run, None, MULTIPLY).tools == MULTIPLY
    )


def test_bytes_that_are_no_text_are_refused(policy):
    for system, said in ((None, "caf\udce9"), ("caf\udce9", "hello")):
        with pytest.raises(InputError, match=r"holds '\\udce9', which is not UTF-8"):
            encode_chat(policy, [HELLO | {"content": said}], prompt_wording(policy, system))


@pytest.mark.slow
def test_a_long_chat_loses_its_beginning_with_a_word_said(policy, task, capsys):
    long = [{"role": role, "content": "x" * 200} for role in ("user", "assistant", "user", "assistant", "user")]
    system = {"role": "system", "content": "Be brief."}
    tokens, kept = fit_context(policy, [system, *long], task, 40)
    assert kept == [system, *long[2:]] and len(tokens) <= 1024 - 40  # of the model's 1024
    assert fit_context(policy, kept, task, 40)[1] == kept
    assert fit_context(policy, [*long[:2], HELLO], task, 2000)[1] == [*long[:2], HELLO]  # a quarter is room enough
    take_turn(policy, [*long, *long[1:]], task, GREEDY, 0)
    assert "the chat is longer than the model's context (1024 tokens): its beginning" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"the prompt has \d+ tokens, and the model was made for 1024: shorten it"):
        take_turn(policy, [*long, {"role": "user", "content": "x" * 1100}], task, GREEDY, 0)


def test_an_answer_that_is_ended_is_what_was_said_of_it(policy, task):
    prompt = encode_chat(policy, [HELLO], task)
    chunks = iter([False, False, True])
    done = print_answer(policy, prompt, 0, GREEDY, lambda: next(chunks))
    assert (done.finish_reason, len(done.tokens)) == ("aborted", 32)
    assert expected(policy, [HELLO]).startswith(done.text.rstrip("\ufffd"))
    assert not len(print_answer(policy, prompt, 0, GREEDY, lambda: True).tokens)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Terminals: of a chat that Ctrl-C ended where a line was typed, with what was seen of it, and one of Ctrl-D."""
    folder = tmp_path_factory.mktemp("talks")
    arguments = ["generate", "tiny-random", "--temperature", "0", "--max_new_tokens", "40"]
    short, long = (Terminal(MAIN, arguments, folder) for _ in range(2))
    long.wait_for("> ")
    long.press(b"hello\r")
    long.wait_for("thinking")
    long.press(CTRL_C)  # the first answer is being compiled
    long.wait_for("> ")
    for line, last in [
        (b"/new", FORGOTTEN), (b"hello", CUT), (b"and again", CUT), (b"/clear", FORGOTTEN), (b"and again", CUT),
        (b"/old", "unknown command /old"), (b"/help", HELP.splitlines()[-1]),
    ]:  # fmt: skip
        long.press(line + b"\r")
        long.wait_for(last)
        long.wait_for("> ")
    long.press(b"half of a line")
    long.wait_for("half of a line")
    long.press(CTRL_C)
    long.wait_for("interrupted")
    kept = long.echoes()
    long.finish()
    short.wait_for("> ")
    short.press(CTRL_D)
    short.finish()
    return long, kept, short


@pytest.mark.slow
def test_a_terminal_has_a_chat(talks, policy):
    begun = talks[0].screen.index(FORGOTTEN)
    chat = [HELLO, {"role": "assistant", "content": expected(policy, [HELLO])}, AGAIN]
    for messages in (chat[:1], chat, [AGAIN]):
        said = printable(expected(policy, messages)).replace("\n", "\r\n")
        begun = talks[0].screen.index(f"thinking\r\x1b[K{said}\r\n{CUT}", begun) + 1


def test_ctrl_c_ends_an_answer_and_the_next_one_the_program(talks):
    terminal, kept, _ = talks
    assert CUT not in terminal.screen[: terminal.screen.index(FORGOTTEN)]
    assert (terminal.process.returncode, terminal.lines()[-2:]) == (130, ["jaxrl-llm: interrupted", ""])
    assert kept and "Traceback" not in terminal.screen


def test_ctrl_d_ends_a_chat(talks):
    assert talks[2].process.returncode == 0 and GREETING in talks[2].screen
