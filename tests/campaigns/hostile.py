"""Hostile inputs: texts, JSON values and bytes, each drawn from a seed or changed from a sound one."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

MARK = "fuzzed_mark"
"""The file that executed inputs create."""
CODE = (
    f"__import__('os').system('touch {MARK}')",
    f"open('{MARK}','w')",
    f"exec(\"open('{MARK}','w')\")",
    f"[x for x in (1,) if open('{MARK}','w')]",
    f"(lambda: open('{MARK}','w'))()",
    f"().__class__.__base__.__subclasses__() or open('{MARK}','w')",
    f"Symbol.__init__.__globals__['__builtins__']['open']('{MARK}','w')",
    f'eval(\'open("{MARK}","w")\')',
    f"sympify(\"open('{MARK}','w')\")",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {MARK}') }}}}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    f"!!python/object/apply:os.system ['touch {MARK}']",
    f"cos\nsystem\n(S'touch {MARK}'\ntR.",
)
"""Texts that leave the mark if anything executes them."""
HARD = (
    "9**9**9**9", "[0]*10**12", "'a'*10**12", "1e999999999", "10**10**10", "factorial(10**9)", "0" * 5000,
    "9" * 5000, "(" * 500, "[" * 3000, "{" * 3000, "\\frac{" * 300, "\\boxed{" * 900, "<answer>" * 900, "-" * 3000,
    "1+" * 800 + "1",
    "x^" * 300 + "x", "\\sqrt{" * 200 + "2" + "}" * 200, "((((((((x+1)^9)^9)^9)^9)^9)^9)^9)^9", "1,000," * 800,
    "\ud800", "\x00", "\u202e", "٣", "１２", "²", "½", "\U0001d7d9", "a\u0301" * 400, "\r\n", "NaN", "Infinity", "-0.0",
    "1/0", "0^0", "log(0)", "\\int_0^\\infty x dx", "\\sum_{n=1}^{10^9} n", "\\lim_{x\\to 0}", "x=1 or x=2", "{1,2,3}",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "(1,2]", "50\\%", "$1,234.56", "1.5e+400", "true", "None",
    "[[1,2],[3]]",
)  # fmt: skip
"""Texts that are slow, large or strange."""
WORDS = (
    "The answer is", "42", "-7.5", "\\boxed{42}", "<answer>", "</answer>", "</think>", "####", "=", "+", "x", "\n", " ",
    "{", "}", "[", "]", "(", ")", "\\", '"', "'", ",", ".", "$", "`", "```python\n", "```", "def f(x):\n", "return",
    ":",
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "<|im_end|>", "[TOOL_CALLS]", "<function=f>",
    "{{", "}}", "{%", "%}", "for", "in", "range(9)", "messages", "endfor", "null", "NaN", "1e400", "\\u0000",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**400, 1e308, 1e-320, 0.5)
VALUES = (None, True, False, "", "x", [], {}, [[]], [None], {"": None}, {"type": "x:Y"}, float("nan"), float("inf"))
MOST_CHANGES = 4


def text(draws: random.Random, seeds: Sequence[str] = ()) -> str:
    """Return a text of words, code and hard pieces; in half of the draws a changed one of ``seeds``."""
    kinds = (WORDS, WORDS, WORDS, HARD, CODE)
    if seeds and draws.random() < 0.5:
        found = list(draws.choice(seeds))
        for _ in range(draws.randint(1, MOST_CHANGES)):
            place = draws.randint(0, len(found))
            piece = draws.choice(draws.choice(kinds))
            found[place : place + draws.choice((0, 1, 5, len(found)))] = piece
        return "".join(found)
    return "".join(draws.choice(draws.choice(kinds)) for _ in range(draws.randint(0, 7)))


def changed_bytes(data: bytes, draws: random.Random, head: int | None = None) -> bytes:
    """Return bytes with a few changes, of which most lie in the first ``head``."""
    found = bytearray(data)
    for _ in range(draws.randint(1, MOST_CHANGES)):
        end = min(head or len(found), len(found)) if draws.random() < 0.8 else len(found)
        place = draws.randint(0, max(end - 1, 0))
        match draws.randint(0, 6):
            case 0:
                found[place : place + 1] = bytes([draws.randint(0, 255)])
            case 1:
                number = draws.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 10**6, 10**9))
                found[place : place + 8] = number.to_bytes(8, "little")
            case 2:
                found[place : place + 4] = draws.choice((0, 1, 255, 2**31, 2**32 - 1)).to_bytes(4, "little")
            case 3:
                del found[place : place + draws.choice((1, 8, 100, len(found)))]
            case 4:
                piece = bytes(found[place : place + draws.randint(1, 64)])
                found[place:place] = piece * draws.choice((1, 2, 200))
            case 5:
                found[place:place] = text(draws).encode("utf-8", "surrogatepass")
            case _:
                found[place : place + 8] = draws.randbytes(8)
    return bytes(found)


def value(draws: random.Random, depth: int = 3) -> Any:
    """Return a JSON value, perhaps nested."""
    match draws.randint(0, 5 if depth else 3):
        case 0:
            return draws.choice(NUMBERS)
        case 1:
            return copy.deepcopy(draws.choice(VALUES))
        case 2 | 3:
            return text(draws)
        case 4:
            return [value(draws, depth - 1) for _ in range(draws.randint(0, 3))]
        case _:
            return {draws.choice(("role", "content", "x", text(draws))): value(draws, depth - 1) for _ in range(2)}


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a JSON value."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


def changed_json(data: Any, draws: random.Random) -> Any:
    """Return a JSON value with a few values changed, removed, moved or repeated."""
    found = json.loads(json.dumps(data))
    for _ in range(draws.randint(1, MOST_CHANGES)):
        *path, last = draws.choice(places(found)[1:] or [("x",)])
        holder = found
        for key in path:
            holder = holder[key]
        if not isinstance(holder, dict | list):
            return value(draws)
        match draws.randint(0, 3):
            case 0 if holder:
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[text(draws)] = value(draws)
            case 2:
                source: Any = found
                for key in draws.choice(places(found)):
                    source = source[key]
                holder[last] = json.loads(json.dumps(source))
            case _:
                holder[last] = value(draws)
        if not found:
            break
    return found


def nested(draws: random.Random) -> str:
    """Return JSON text that is nested deeply, or holds a number of very many digits."""
    deep = draws.choice((50, 900, 5000, 200_000))
    return draws.choice(("[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "9" * deep, "[" * deep))


def json_text(data: Any, draws: random.Random) -> str:
    """Return the text of a changed JSON value; sometimes one that is no JSON."""
    if draws.random() < 0.05:
        return nested(draws)
    whole = json.dumps(changed_json(data, draws))
    return text(draws, [whole]) if draws.random() < 0.2 else whole
