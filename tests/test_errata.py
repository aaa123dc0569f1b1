"""The errata of notes: the session errata.pycon runs, and the tables of both pages print its numbers."""

import doctest
import re
from pathlib import Path

import pytest

from jaxrl_llm.algorithms import advantages, kl, ratios, reduce, surrogates
from jaxrl_llm.recipes import RECIPES

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[1] / "docs"
SESSION = Path(__file__).with_name("errata.pycon").read_text()
ENGLISH, CHINESE = ((DOCS / f"{name}.md").read_text() for name in ("errata", "zh"))


def rows(text):
    """The last cell of each numbered row, by its number."""
    return {int(number): cell for number, cell in re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)}


def decimals(cell):
    """The decimal numbers of a cell, as they are printed."""
    return re.findall(r"-?\d+\.\d+", cell)


def test_the_session_prints_what_it_shows():
    test = doctest.DocTestParser().get_doctest(SESSION, {}, "errata.pycon", "errata.pycon", 0)
    wrong = []
    doctest.DocTestRunner(verbose=False).run(test, out=wrong.append)
    assert len(test.examples) > 70 and not wrong, "".join(wrong)


def test_the_numbers_of_the_table_are_those_of_the_session():
    shown = set(re.findall(r"-?\d+\.\d+", re.sub(r"^(>>>|\.\.\.).*$", "", SESSION, flags=re.MULTILINE)))
    cells = rows(ENGLISH)
    assert list(cells) == list(range(1, 28))
    for number, cell in cells.items():
        stated = [x for x in decimals(cell) if x not in ("1.5", "0.99", "0.01", "0.2") or number == 12]
        assert all(any(printed.startswith(x) for printed in shown) for x in stated), (number, stated)


def test_both_languages_state_the_same_numbers():
    assert list(rows(CHINESE)) == list(rows(ENGLISH))
    for number, cell in rows(ENGLISH).items():
        assert sorted(decimals(cell)) == sorted(decimals(rows(CHINESE)[number])), number


def test_methods_side_by_side_are_the_recipes():
    table = CHINESE[CHINESE.index("| 配方 |") :]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.split("\n\n")[0].splitlines()]
    names, estimators, levels, clips, reducers, _, penalties, temperatures = cells[:8]
    words = vars(advantages) | vars(ratios) | vars(surrogates) | vars(reduce) | vars(kl)
    for column, name in enumerate(names):
        recipe = RECIPES[name.strip("`")]
        algorithm = recipe.algorithm
        pieces = (
            (estimators, getattr(algorithm.advantage, "estimator", algorithm.advantage)),
            (levels, algorithm.ratio),
            (clips, algorithm.surrogate),
            (reducers, algorithm.reduce),
            (penalties, algorithm.kl),
        )
        for row, piece in pieces:
            written = re.match(r"`([^`]+)`|无", row[column])[1]
            assert (eval(written, dict(words)) if written else None) == piece, (name, row[column])
        assert not algorithm.kl_coef or float(row[column].split("，")[-1]) == algorithm.kl_coef
        assert float(temperatures[column]) == recipe.temperature
