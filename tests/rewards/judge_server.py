"""A judge behind a real HTTP server of this process, which answers by rules."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxrl_llm.rewards import Endpoint

BLOCK = r"<judged-{name}-{code}>\n(.*?)\n</judged-{name}-{code}>"


def part(name: str, body: dict) -> str:
    """What stands between the tags of this name that carry the code of the system's message."""
    code = re.search(r"the code ([0-9a-f]+)\.", body["messages"][0]["content"])[1]
    found = re.search(BLOCK.format(name=name, code=code), body["messages"][1]["content"], re.DOTALL)
    return found[1] if found else ""


def code(body: dict) -> str:
    return re.search(r"the code ([0-9a-f]+)\.", body["messages"][0]["content"])[1]


def honest(body: dict) -> str:
    """Each item is a text that the answer must hold; of two answers the one with more digits is better."""
    items = re.findall(r"^\d+\. (.*)$", body["messages"][1]["content"].rpartition("\nCriteria:\n")[2], re.MULTILINE)
    if not items:
        first, second = (sum(map(str.isdigit, part(f"answer-{name}", body))) for name in "AB")
        better = "tie" if first == second else "A" if first > second else "B"
        return json.dumps({"code": code(body), "reason": "digits", "better": better})
    answer = part("answer", body)
    rows = [{"item": at, "reason": "", "met": item in answer} for at, item in enumerate(items, start=1)]
    return json.dumps({"code": code(body), "verdicts": rows})


class Server(ThreadingHTTPServer):
    """One that refuses nobody who asks at the same time as others."""

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.began.append(time.monotonic())
            server.asked.append((self.path, dict(self.headers), body))
            server.busy += 1
            server.most = max(server.most, server.busy)
            number = len(server.asked)
        with contextlib.suppress(OSError):  # the client has given up
            self.reply(server.answers(body, number))
        with server.lock:
            server.busy -= 1

    def reply(self, said):
        status, headers, text = said if isinstance(said, tuple) else (200, {}, complete(said))
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(text.encode()))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def complete(text: str) -> str:
    """A whole response in OpenAI's form."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})


@contextlib.contextmanager
def serving(
    answers: Callable[[dict, int], object] = lambda body, number: honest(body),
) -> Iterator[ThreadingHTTPServer]:
    """A server; ``answers(body, number)`` gives the text of an answer, or (status, headers, text)."""
    server = Server(("127.0.0.1", 0), Handler)
    server.answers, server.asked, server.began, server.busy, server.most = answers, [], [], 0, 0
    server.lock = threading.Lock()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def endpoint(server: ThreadingHTTPServer, **settings) -> Endpoint:
    """The endpoint of a server, with short pauses."""
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return Endpoint(url, "judge", **({"backoff_s": 0.01, "timeout_s": 5.0, "deadline_s": 20.0} | settings))
