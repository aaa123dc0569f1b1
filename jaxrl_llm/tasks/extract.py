"""Extraction of answers from texts, and the plain numbers that answers are made of."""

import functools
import re
import unicodedata
from decimal import Decimal, InvalidOperation

from jaxrl_llm.errors import InputError

EXTRACTORS = ("last_number", "boxed", "tag:NAME", "after:TAG", "whole")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![.\w])\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER = re.compile(_UNSIGNED)
_WHOLE_NUMBER = re.compile(rf"[$€£]?([+-]?)[$€£]?({_UNSIGNED})[.。]?")
_BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_CURRENCY = "$€£"
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")
_OTHER_VALUES = ("<super>", "<sub>", "<fraction>", "<square>")
"""Kinds of characters that NFKC would turn into other numbers: 5² into 52, 3½ into 31/2, 25㎡ into 25m2."""
_TOWER = re.compile(r"(?:\*\*|\^)\s*[({]*\s*(?:\d+\s*(?:\*\*|\^)|\d{7})")
_FEW = 32
_INTEGER_DIGITS = 1000


def extract(text: str, extractor: str) -> str | None:
    r"""Extract the answer from a text; None if it has none.

    ``last_number``: the last number, without currency sign and thousands separators (``"$1,234."`` -> ``"1234"``); a
    minus sign directly before it counts unless it subtracts (``"7-3"`` -> ``"3"``). ``boxed``: the content of the last
    complete ``\boxed{...}``. Both read full-width characters (``normalised``). ``tag:NAME``: the content of the last
    complete ``<NAME>...</NAME>``. ``after:TAG``: the text after the last TAG, such as ``after:</think>``;
    ``after:think`` means the same. A text without the TAG has no answer: a model that begins to think and is cut off
    has not answered. ``whole``: the text. These three keep the text as written, apart from surrounding white space,
    since a verifier may count its characters.

    >>> extract("7 - 10 = -3.", "last_number")
    '-3'
    >>> extract("3, or 4?</think>It is 4.", "after:</think>")
    'It is 4.'

    Raises:
      InputError: the extractor is unknown.
    """
    if extractor == "last_number":
        return _last_number(normalised(text))
    if extractor == "boxed":
        return _last_boxed(normalised(text))
    if extractor == "whole":
        return text.strip() or None
    if extractor.startswith("tag:") and extractor[4:]:
        return _last_tag(text, extractor[4:]) or _last_tag(normalised(text), extractor[4:])
    if extractor.startswith("after:") and extractor[6:].strip():
        _, found, answer = text.rpartition(marker(extractor))
        return answer.strip() or None if found else None
    raise InputError(f"extractor {extractor!r} is unknown; choose one of {', '.join(EXTRACTORS)}")


def answer_of(text: str, extractor: str) -> str | None:
    """Extract the answer and return it ``normalised``, the form in which answers are compared."""
    found = extract(text, extractor)
    return None if found is None else normalised(found)


def too_large(text: str) -> bool:
    """Whether a text has a power of a power of numbers, or an exponent of seven digits: to write such a number out
    takes minutes and gigabytes.

    >>> too_large("10^{10^{10}}"), too_large("9**9**9"), too_large("2^{1000}"), too_large("(x^2)^3")
    (True, True, False, False)
    """
    return _TOWER.search(text) is not None


def normalised(text: str) -> str:
    """Return the text in the characters that answers are compared in: full-width, half-width and mathematical letters,
    digits and signs become plain ones, and so does the minus sign. Characters that this would turn into another number
    stay.

    It is NFKC without superscripts, subscripts, fractions and squared units. Code that counts characters must not use
    it.

    >>> normalised("－１，２３４．５ m²")
    '-1,234.5 m²'
    """
    if text.isascii():
        return text
    others = [character for character in set(text) if _normal_character(character) != character]
    if len(others) > _FEW:
        text = "".join(map(_normal_character, text))
    else:  # in a long text this is much faster
        for character in others:
            text = text.replace(character, _normal_character(character))
    return unicodedata.normalize("NFC", text)


@functools.lru_cache(maxsize=4096)
def _normal_character(character: str) -> str:
    if character == "\N{MINUS SIGN}":
        return "-"
    if unicodedata.decomposition(character).startswith(_OTHER_VALUES):
        return character
    return unicodedata.normalize("NFKC", character)


def marker(extractor: str) -> str:
    """Return the text after which ``after:TAG`` looks: TAG itself, or the closing tag of a bare name."""
    tag = extractor.removeprefix("after:").strip()
    return f"</{tag}>" if _TAG_NAME.fullmatch(tag) else tag


def number(text: str) -> Decimal | None:
    """Parse a text that is a number as a whole, currency sign and thousands separators allowed; None if it is not.

    >>> number("+1,000.0") == 1000
    True
    """
    match = _WHOLE_NUMBER.fullmatch(normalised(text).strip())
    if match is None:
        return None
    try:
        return Decimal(match[1] + match[2].replace(",", ""))
    except InvalidOperation:  # an exponent beyond what Decimal holds
        return None


def integer(text: str) -> int | None:
    """Parse a text that is an integer as a whole (``"3.0"``, ``"1,000"``, ``"+3"``); None if it is not.

    Numbers of more than 1000 digits give None: a model may write 1e999999999.
    """
    value = number(text)
    if value is None or value.adjusted() >= _INTEGER_DIGITS:
        return None
    whole = value.to_integral_value()
    return int(whole) if whole == value else None


def _last_number(text: str) -> str | None:
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    start = match.start()
    while start and text[start - 1] in _CURRENCY:
        start -= 1
    found = match[0].replace(",", "")
    if not start or text[start - 1] != "-":
        return found
    before = text[start - 2] if start > 1 else " "
    # After an operand it is a subtraction or a hyphen; scripts without spaces write the sign directly behind a word.
    operand = before in ")]}%_" or (before.isalnum() and unicodedata.category(before) != "Lo")
    return found if operand else f"-{found}"


def _last_boxed(text: str) -> str | None:
    """Return the content of the last complete box; one pass with a stack, because a model that repeats itself may open
    thousands of boxes. ``\\{`` is text.
    """
    open_braces: list[int | None] = []  # where the content starts, or None for a brace that opens no box
    best = (-1, -1)
    for brace in _BRACE.finditer(text):
        if brace[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                best = max(best, (start, brace.start()))
        elif brace[0] in ("{", r"\boxed{"):
            open_braces.append(None if brace[0] == "{" else brace.end())
    return text[best[0] : best[1]].strip() or None if best[0] >= 0 else None


def _last_tag(text: str, name: str) -> str | None:
    for after in reversed(text.split(f"<{name}>")[1:]):
        content, closing, _ = after.partition(f"</{name}>")
        if closing:
            return content.strip() or None
    return None
