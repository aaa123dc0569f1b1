"""Extraction of answers from texts, and the plain numbers that answers are made of."""

import functools
import re
import unicodedata
from decimal import Decimal, InvalidOperation

from jaxrl_llm.errors import InputError

EXTRACTORS = ("last_number", "boxed", "tag:NAME", "after:TAG", "whole")

_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![.\w])\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_CURRENCY = "$€£¥₹"
_MONEY = rf"(?:\\?[{_CURRENCY}])?"
_WHOLE_NUMBER = re.compile(rf"{_MONEY}([+-]?) ?{_MONEY}({_UNSIGNED})(?: ?{_MONEY})[.。]?")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!;: ]|\\!,|[\u00a0\u2009\u202f~])(?=[0-9]{3}(?![0-9]))")
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9]) ?(?:\\times|\\cdot|[×·*x]) ?10 ?(?:\^|\*\*) ?(?:\{ ?([+-]?[0-9]{1,9}) ?\}|([+-]?[0-9]{1,9}))(?![0-9.])"
)
_WRAPPED = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]"
    r"|\*\*([^*]+)\*\*|__([^_]+)__|\*([^*]+)\*|`([^`]+)`"
    r"|\\(?:text|textbf|mathbf|mathrm|boldsymbol|bm|boxed|fbox) ?\{((?:[^{}]|\{[^{}]*\})+)\}",
    re.DOTALL,
)
_BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t]*"
_INTEGER_DIGITS = 1000


def extract(text: str, extractor: str) -> str | None:
    r"""Extract the answer from a text; None if it has none.

    ``last_number``: the last number, without currency sign and thousands separators (``"$1,234."`` -> ``"1234"``); a
    minus sign directly before it counts unless it subtracts (``"7-3"`` -> ``"3"``), and so does a power of ten after it
    (``"2 \times 10^3"`` -> ``"2e3"``). ``boxed``: the content of the last complete ``\boxed{...}`` or ``\fbox{...}``
    that is not empty, or ``\boxed 5``; of several side by side on a line, all (``"2, 3"``). Both read full-width
    characters (``normalise``). ``tag:NAME``: the content of the last complete ``<NAME>...</NAME>``. ``after:TAG``: the
    text after the last TAG, such as ``after:</think>``; ``after:think`` means the same. A text without the TAG has no
    answer: a model that begins to think and is cut off has not answered. ``whole``: the text. These three keep the text
    as written, apart from surrounding white space, since a verifier may count its characters. InputError: the extractor
    is unknown.

    >>> extract("7 - 10 = -3.", "last_number")
    '-3'
    >>> extract("3, or 4?</think>It is 4.", "after:</think>")
    'It is 4.'
    """
    if extractor == "last_number":
        return _last_number(_without_thousands(text))
    if extractor == "boxed":
        return _last_boxed(normalise(text))
    if extractor == "whole":
        return text.strip() or None
    if extractor.startswith("tag:") and extractor[4:]:
        return _last_tag(text, extractor[4:]) or _last_tag(normalise(text), extractor[4:])
    if extractor.startswith("after:") and extractor[6:].strip():
        _, tag, answer = text.rpartition(marker(extractor))
        return answer.strip() or None if tag else None
    raise InputError(f"extractor {extractor!r} is unknown; choose one of {', '.join(EXTRACTORS)}")


def answer_of(text: str, extractor: str) -> str | None:
    """Extract the answer and return it as ``normalise`` writes it."""
    answer = extract(text, extractor)
    return None if answer is None else normalise(answer)


def wrap_answer(answer: str, extractor: str) -> str:
    """Return a text from which ``extract`` should cut this answer: some words, and the answer in the form of it."""
    kind, _, tag = extractor.partition(":")
    thought = "Let me think about it step by step."
    if kind == "whole":
        return answer
    if kind == "after":
        return f"{thought}{marker(extractor)}{answer}"
    form = {"boxed": rf"\boxed{{{answer}}}", "tag": f"<{tag}>{answer}</{tag}>"}.get(kind, answer)
    return f"{thought} The answer is {form}"


def normalise_answer(text: str) -> str:
    r"""Return an answer or a reference in the one form in which both are compared: ``normalise``, without what marks
    it as mathematics, bold, code or boxed, separators of thousands that LaTeX writes, and escapes of currencies.

    >>> normalise_answer(r"\$9{,}500"), normalise_answer(r"**\(\text{Paris}\)**")
    ('$9500', 'Paris')
    """
    text = _THOUSANDS.sub("", _without_thousands(text)).strip()
    while match := _WRAPPED.fullmatch(text):
        text = next(filter(None, match.groups())).strip()
    return re.sub(rf"\\(?=[{_CURRENCY}%])", "", text)


def _without_thousands(text: str) -> str:
    return normalise(text if text.isascii() else _THOUSANDS.sub("", text))


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are equal numbers, or equal texts but for case, white space and a full stop at the end."""
    value, other = parse_number(answer), parse_number(reference)
    if value is not None and other is not None:
        return same_number(value, other)
    texts = (" ".join(normalise_answer(text).split()) for text in (answer, reference))
    first, second = (re.sub(r"\s*,\s*", ",", text).rstrip(".。").casefold() for text in texts)
    return first == second


def matches(answer: str, reference: str, verifier: str) -> bool:
    """Whether an answer is the reference by verifier ``integer`` (in any notation) or ``match`` (``same_answer``)."""
    if verifier == "integer":
        value = integer(answer)
        return value is not None and value == integer(reference)
    return same_answer(answer, reference)


def same_number(value: Decimal, reference: Decimal) -> bool:
    """Whether a number is the reference: exactly if the reference is an integer, else within 1e-6 of it, relatively."""
    if value == reference:
        return True
    exact = reference.adjusted() >= _INTEGER_DIGITS or reference == reference.to_integral_value()
    return not exact and abs(value - reference) <= Decimal("1e-6") * max(abs(value), abs(reference))


def too_large(text: str) -> bool:
    """Whether a text has a power of a power of numbers, or a seven-digit exponent: to write it out takes gigabytes.

    >>> too_large("10^{10^{10}}"), too_large("9**9**9"), too_large("2^{1000}"), too_large("(x^2)^3")
    (True, True, False, False)
    """
    return re.search(r"(?:\*\*|\^)\s*[({]*\s*(?:\d+\s*(?:\*\*|\^)|\d{7})", text) is not None


def normalise(text: str) -> str:
    """Return the text in the characters that answers are compared in: full-width, half-width and mathematical letters,
    digits and signs, and the minus sign, become plain ones, unless that makes another number. It is NFKC without
    superscripts, subscripts, fractions and squared units; code that counts characters must not use it.

    >>> normalise("－１，２３４．５ m²")
    '-1,234.5 m²'
    """
    if text.isascii():
        return text
    characters = [character for character in set(text) if _normal_character(character) != character]
    if len(characters) > 32:
        text = "".join(map(_normal_character, text))
    else:  # in a long text this is much faster
        for character in characters:
            text = text.replace(character, _normal_character(character))
    return unicodedata.normalize("NFC", text)


@functools.lru_cache(maxsize=4096)
def _normal_character(character: str) -> str:
    if character in "\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}":
        return "-"
    # Kinds of characters that NFKC would turn into other numbers: 5² into 52, 3½ into 31/2, 25㎡ into 25m2.
    if unicodedata.decomposition(character).startswith(("<super>", "<sub>", "<fraction>", "<square>")):
        return character
    return unicodedata.normalize("NFKC", character)


def marker(extractor: str) -> str:
    """Return the text after which ``after:TAG`` looks: TAG itself, or the closing tag of a bare name."""
    tag = extractor.removeprefix("after:").strip()
    return f"</{tag}>" if re.fullmatch(r"[A-Za-z][\w-]*", tag) else tag


def parse_number(text: str) -> Decimal | None:
    """Parse a text that is a number as a whole, currency sign and thousands separators allowed; None if it is not.

    >>> parse_number("+1,000.0") == 1000
    True
    """
    lone_power = r"^([+-]?)(?=10 ?(?:\^|\*\*))"  # a power alone is once that power
    value = re.sub(lone_power, r"\g<1>1*", normalise_answer(text))
    match = _WHOLE_NUMBER.fullmatch(_POWER_OF_TEN.sub(_exponent, value))
    if match is None:
        return None
    try:
        return Decimal(match[1] + match[2].replace(",", ""))
    except InvalidOperation:  # an exponent beyond what Decimal holds
        return None


def integer(text: str) -> int | None:
    """Parse a text that is an integer as a whole (``"3.0"``, ``"1,000"``, ``"+3"``); None if it is not. Numbers of more
    than 1000 digits give None: a model may write 1e999999999.
    """
    value = parse_number(text)
    if value is None or value.adjusted() >= _INTEGER_DIGITS:
        return None
    rounded = value.to_integral_value()
    return int(rounded) if rounded == value else None


def _exponent(match: re.Match[str]) -> str:
    return f"e{match[1] or match[2]}"


def _last_number(text: str) -> str | None:
    text = _POWER_OF_TEN.sub(_exponent, _THOUSANDS.sub("", text))
    matches = list(re.finditer(_UNSIGNED, text))
    if not matches:
        return None
    match = matches[-1]
    start = match.start()
    while start and text[start - 1] in _CURRENCY + "\\":
        start -= 1
    number = match[0].replace(",", "")
    if not start or text[start - 1] != "-":
        return number
    previous = text[start - 2] if start > 1 else " "
    # After an operand it is a subtraction or a hyphen; scripts without spaces write the sign directly behind a word.
    operand = previous in ")]}%_" or (previous.isalnum() and unicodedata.category(previous) != "Lo")
    return number if operand else f"-{number}"


def _last_boxed(text: str) -> str | None:
    """Return the content of the last complete box, in one pass: a model may open thousands. ``\\{`` is text."""
    unbraced = re.compile(
        r"(?:[+-]?[0-9.]|\\(?!boxed|fbox|framebox)[A-Za-z]|[A-Z](?![A-Za-z]))(?:[^\s${}\\]|\\[A-Za-z]+|\{[^{}]*\})*"
    )
    no_value = re.compile(r"(?:[\s.…_?]|\\[lc]?dots|\\[,;:! ])*")
    between = re.compile(r"(?:[ \t$,;&]|and|or|\\text ?\{ ?(?:and|or) ?\}|\\q?quad|\\[,;:! ()])*")
    open_braces: list[tuple[int, int] | None] = []  # where box and content start, or None for a brace that opens no box
    boxes: list[tuple[int, int, str]] = []  # begin, end and content, in order of the ends
    for brace in re.finditer(rf"(?P<box>{_BOX}\{{)|(?P<bare>{_BOX})|\\.|[{{}}]", text, flags=re.DOTALL):
        if brace["bare"]:
            if bare := unbraced.match(text, brace.end()):
                boxes.append((brace.start(), bare.end(), bare[0].rstrip(".,;:!?")))
        elif brace[0] == "}":
            opening = open_braces.pop() if open_braces else None
            if opening and not no_value.fullmatch(text, opening[1], brace.start()):
                boxes.append((opening[0], brace.end(), text[opening[1] : brace.start()].strip()))
        elif brace["box"] or brace[0] == "{":
            open_braces.append((brace.start(), brace.end()) if brace["box"] else None)
    if not boxes:
        return None
    boxes.sort()
    side_by_side = [boxes.pop()]
    while boxes:
        gap = boxes[-1][1], side_by_side[-1][0]
        if not 0 <= gap[1] - gap[0] <= 40 or not between.fullmatch(text, *gap):
            break
        side_by_side.append(boxes.pop())
    return ", ".join(dict.fromkeys(content for *_, content in reversed(side_by_side)))


def _last_tag(text: str, name: str) -> str | None:
    for following in reversed(text.split(f"<{name}>")[1:]):
        content, closing, _ = following.partition(f"</{name}>")
        if closing:
            return content.strip() or None
    return None
