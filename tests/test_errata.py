"""The errata of notes: their session runs, and both tables print its numbers."""

import doctest
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ENGLISH, CHINESE = ((DOCS / f"{name}.md").read_text() for name in ("errata", "zh"))


def rows(text):
    """The last cell of each numbered row, by its number."""
    return {int(number): cell for number, cell in re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)}


def decimals(cell):
    """The decimal numbers of a cell, as they are printed."""
    return re.findall(r"-?\d+\.\d+", cell)


def test_the_session_prints_what_the_page_shows():
    blocks = re.findall(r"```pycon\n(.*?)```", ENGLISH, re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "errata.md", "errata.md", 0)
    wrong = []
    doctest.DocTestRunner(verbose=False).run(test, out=wrong.append)
    assert len(test.examples) > 70 and not wrong, "".join(wrong)


def test_the_numbers_of_the_table_are_those_of_the_session():
    session = ENGLISH[ENGLISH.index("## The numbers") :]
    shown = set(re.findall(r"-?\d+\.\d+", re.sub(r"^(>>>|\.\.\.).*$", "", session, flags=re.MULTILINE)))
    cells = rows(ENGLISH)
    assert list(cells) == list(range(1, 28))
    for number, cell in cells.items():
        stated = [x for x in decimals(cell) if x not in ("1.5", "0.99", "0.01", "0.2") or number == 12]
        assert all(any(printed.startswith(x) for printed in shown) for x in stated), (number, stated)


def test_both_languages_state_the_same_numbers():
    assert list(rows(CHINESE)) == list(rows(ENGLISH))
    for number, cell in rows(ENGLISH).items():
        assert sorted(decimals(cell)) == sorted(decimals(rows(CHINESE)[number])), number
