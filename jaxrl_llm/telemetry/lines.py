"""Text of anybody's, as one line of a terminal: nothing in it drives the terminal, and it is cut where it must be."""

from rich.cells import cell_len, set_cell_size

ELLIPSIS = "…"


def harmless(text: str) -> str:
    """``text`` on one line: control characters, of direction too, become spaces, and white space is joined."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def abridge(text: str, limit: int, mark: str = ELLIPSIS) -> str:
    """``text`` on one line in at most ``limit`` columns: the middle is left out, since answers stand at the end.

    ``mark`` stands for what is left out.
    """
    text = harmless(text)
    if cell_len(text) <= limit:
        return text
    half = (limit - cell_len(mark) - 2) // 2
    if half < 1:
        return head(text, limit, mark)
    # Whole words, where there are any.
    return f"{_start(text, half).rsplit(' ', 1)[0].rstrip()} {mark} {_end(text, half).split(' ', 1)[-1]}"


def head(text: str, limit: int, mark: str = ELLIPSIS) -> str:
    """The beginning of one line, in at most ``limit`` columns."""
    return text if cell_len(text) <= limit else _start(text, limit - cell_len(mark)).rstrip() + mark


def tail(text: str, limit: int, mark: str = ELLIPSIS) -> str:
    """Its end: questions stand at the end of prompts."""
    return text if cell_len(text) <= limit else mark + _end(text, limit - cell_len(mark)).lstrip()


def _start(text: str, columns: int) -> str:
    return set_cell_size(text, max(columns, 0)).rstrip()


def _end(text: str, columns: int) -> str:
    """As much of the end as fits; a letter may take two columns."""
    begin = len(text)
    left = columns
    while begin and (left := left - cell_len(text[begin - 1])) >= 0:
        begin -= 1
    return text[begin:]
