"""The client of an endpoint against a real server: retries, limits, what hangs, the cache, and keys."""

import json
import os
import threading
import time

import numpy as np
import pytest
from rewards.judge_server import complete, endpoint, honest, serving

from jaxrl_llm.rewards import Endpoint, Rubric, Scorer
from jaxrl_llm.rewards.endpoint import Client, EndpointError, JudgeAnswer
from jaxrl_llm.types import Completion, Problem

KEY = "sk-secret-0123"


def chat(text):
    return [{"role": "user", "content": text}]


def asked(answers, *texts, **settings):
    """What a client says of these chats, and the server."""
    with serving(answers) as server:
        return Client(endpoint(server, **settings)).ask([chat(text) for text in texts]), server


def echo(body, number):
    return body["messages"][0]["content"]


def test_answers_keep_their_order_and_equal_chats_are_asked_once():
    found, server = asked(echo, "a", "b", "a", "c")
    assert found == [
        JudgeAnswer("a", 100, 10), JudgeAnswer("b", 100, 10), JudgeAnswer("a", cached=True), JudgeAnswer("c", 100, 10),
    ]  # fmt: skip
    path, headers, body = server.asked[0]
    assert len(server.asked) == 3 and path == "/v1/chat/completions" and "Authorization" not in headers
    assert body == {"model": "judge", "messages": body["messages"], "temperature": 0.0, "max_tokens": 1024}
    assert found[0].cost((1.0, 10.0)) == 200 / 1e6 and found[2].cost((1.0, 10.0)) == 0


def test_no_more_than_the_limit_are_under_way():
    def slow(body, number):
        time.sleep(0.02)
        return "x"

    assert asked(slow, *"abcdefghij", concurrency=3)[1].most in (2, 3)


def test_requests_are_spaced_by_the_rate_limit():
    begun = time.monotonic()
    _, server = asked(echo, *"abcd", requests_per_minute=1200)
    since = np.array(sorted(server.began)) - begun
    assert len(since) == 4 and (since >= 0.05 * np.arange(4)).all()


@pytest.mark.parametrize(
    "first",
    [
        (429, {"Retry-After": "0.05"}, "slow down"),
        (429, {"Retry-After": "tomorrow"}, ""),
        (503, {}, "busy"),
        (200, {}, "{half a"),
        (200, {}, "[]"),
        (200, {}, '{"choices": []}'),
        (200, {}, '{"choices": [{"message": {"content": 7}}]}'),
    ],
)
def test_what_may_pass_is_tried_again(first):
    found, server = asked(lambda body, number: first if number == 1 else "ok", "a")
    assert found == [JudgeAnswer("ok", 100, 10)] and len(server.asked) == 2
    if "0.05" in first[1].values():
        assert server.began[1] - server.began[0] >= 0.05


def test_what_stays_wrong_is_an_error_after_the_last_try():
    [error], server = asked(lambda body, number: (500, {}, "broken"), "a", retries=2)
    assert len(server.asked) == 3 and isinstance(error, EndpointError)
    assert str(error).endswith("/v1/chat/completions answered 500 (broken)")
    [error], server = asked(lambda body, number: (400, {}, "no such model"), "a")
    assert len(server.asked) == 1 and "answered 400 (no such model)" in str(error)
    [error], server = asked(lambda body, number: (200, {}, "{}"), "a", retries=0)
    assert "answered without choices[0].message.content ({})" in str(error)


def test_an_endpoint_that_hangs_costs_its_time_alone():
    end = threading.Event()
    begun = time.monotonic()
    hangs = lambda body, number: echo(body, number) if echo(body, number) != "a" else end.wait(30) and ""
    [lost, fine], _ = asked(hangs, "a", "b", timeout_s=0.4, retries=1)
    assert fine == JudgeAnswer("b", 100, 10) and "gave no answer within 0.4 s" in str(lost)
    [late], _ = asked(hangs, "a", timeout_s=30.0, deadline_s=0.1)
    assert "gave no answer within 0.1 s" in str(late) or "gave no answer within 30 s" in str(late)
    assert time.monotonic() - begun < 10
    end.set()


def test_no_redirect_is_followed():
    with serving() as other:
        place = f"http://127.0.0.1:{other.server_address[1]}/v1/chat/completions"
        for status in (301, 302, 307):
            [error], _ = asked(lambda body, number, s=status: (s, {"Location": place}, ""), "a")
            assert f"answered {status}" in str(error)
        assert other.asked == []


def test_answers_are_kept_by_content_in_a_file(tmp_path):
    path = tmp_path / "deep" / "judge.jsonl"
    with serving(echo) as server:
        one = endpoint(server, cache=str(path))
        assert Client(one).ask([chat("a"), chat("b")])[1] == JudgeAnswer("b", 100, 10)
        with path.open("a") as file:
            file.write('{"key": "torn')
        again = Client(one).ask([chat("b"), chat("c")])
        assert again == [JudgeAnswer("b", cached=True), JudgeAnswer("c", 100, 10)] and len(server.asked) == 3
        warmer = endpoint(server, cache=str(path), options={"temperature": 1.0})
        assert not Client(warmer).ask([chat("a")])[0].cached, "other settings are another content"


def test_a_key_is_sent_and_told_nobody(tmp_path):
    os.environ["JUDGE_KEY_OF_A_TEST"] = f"{KEY}\n"
    try:
        path = tmp_path / "judge.jsonl"
        settings = {"key_env": "JUDGE_KEY_OF_A_TEST", "cache": str(path), "retries": 0}
        told = lambda body, number: (200, {}, complete(f"{honest(body)} {KEY}"))
        refused = lambda body, number: (401, {}, f"Incorrect API key provided: {KEY}")
        prompt = ({"role": "user", "content": "why?"},)
        item = Completion(np.arange(3), np.zeros(3), "stop", np.ones(3, bool), np.zeros(3, int), text="red")
        for answers in (told, refused):
            with (
                serving(answers) as server,
                Scorer((Rubric((("red", 1.0),), endpoint(server, **settings)),), folder=tmp_path) as scorer,
            ):
                found = scorer.score([(Problem("1", prompt, "", "t"), item)])
                assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"
        assert "answered 401: set key_env to the variable with its key (Incorrect API key provided: ***)" in (
            found.failures.message
        )
        assert all(KEY not in file.read_text() for file in tmp_path.iterdir()) and KEY not in repr(found)
        assert "***" in json.loads(path.read_text())["text"]
    finally:
        del os.environ["JUDGE_KEY_OF_A_TEST"]


def test_what_cannot_be_reached_says_where():
    [error] = Client(Endpoint("http://127.0.0.1:9/v1/chat/completions", "m", retries=0)).ask([chat("a")])
    assert str(error) == (
        "http://127.0.0.1:9/v1/chat/completions cannot be reached ([Errno 111] Connection refused): start it, or "
        "correct its url"
    )
