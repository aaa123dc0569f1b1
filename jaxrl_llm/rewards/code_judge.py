"""Words of the process that judges assertions apart from the program; its code begins with the text of this module."""

import math
import random


class Foreign:
    """Object of the program that is no data. It differs from all data; of two of them nobody knows which is less, or
    whether they are equal: answers are tried.
    """

    compared, chance = False, 1.0

    def _answer(self, other):
        if not isinstance(other, Foreign):
            return NotImplemented
        Foreign.compared = True
        return random.random() < Foreign.chance

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _answer

    def __hash__(self):
        return 0


class Careful(float):
    """Infinite number of the program, or none: it compares as usual, but arithmetic makes it a NaN without an order."""


def _careful(name):
    def method(self, *operands):
        value = getattr(float, name)(self, *operands)
        if isinstance(value, bool) and any(operand != operand for operand in (self, *operands)):
            raise ValueError("what is not a number has no order")
        if isinstance(value, bool) or value is NotImplemented or math.isfinite(value):
            return value
        return Careful(value if name in ("__abs__", "__neg__") else "nan")

    return method


for _name in "abs neg add radd sub rsub mul rmul truediv rtruediv mod rmod pow rpow lt le gt ge".split():
    setattr(Careful, f"__{_name}__", _careful(f"__{_name}__"))
DECODERS = {
    "other": lambda name: Foreign(),
    "float": lambda text: float(text) if math.isfinite(float(text)) else Careful(text),
}


def apart_verdict(judge):
    """Return whether an assertion holds; None if that depends on what objects of the program are equal."""
    answers = set()
    for chance in (1, 0, *[0.5] * 62):
        Foreign.compared, Foreign.chance = False, chance
        try:
            answer = judge()
            answers.add(answer is not NotImplemented and bool(answer))
        except NameError:
            raise
        except Exception:  # noqa: BLE001  whatever the program's values lead to
            answers.add(False)
        if not Foreign.compared or len(answers) > 1:
            break
    return answers.pop() if len(answers) == 1 else None


def apart_assertAlmostEqual(first, second, places=7, msg=None, delta=None):
    return first == second or abs(first - second) <= (0.5 * 10**-places if delta is None else delta)


def apart_assert_allclose(actual, desired, rtol=1e-07, atol=0, *_, **options):
    if isinstance(actual, (list, tuple)) or isinstance(desired, (list, tuple)):
        pairs = zip(actual, desired, strict=True)
        return all(apart_assert_allclose(*pair, rtol, atol) for pair in pairs)
    if not math.isfinite(actual) or not math.isfinite(desired):
        return actual == desired or (actual != actual and desired != desired)
    return abs(actual - desired) <= atol + rtol * abs(desired)


def apart_assert_almost_equal(actual, desired, decimal=7, *_, **options):
    return apart_assert_allclose(actual, desired, 0, 1.5 * 10**-decimal)


def apart_assert_array_almost_equal(actual, desired, decimal=6, *_, **options):
    return apart_assert_almost_equal(actual, desired, decimal)
