"""Words of the process that judges assertions apart from the program; its code begins with the text of this module."""

import math
from typing import ClassVar


class Foreign:
    """Object of the program that is no data. It differs from all data; whether two of them are equal, or which is less,
    is not known: each answer is tried.
    """

    script: ClassVar[list[bool]] = []
    asked: ClassVar[list[bool]] = []

    def __init__(self, kind):
        self.kind = kind

    def _answer(self, other):
        if not isinstance(other, Foreign):
            return NotImplemented
        place = len(Foreign.asked)
        Foreign.asked.append(Foreign.script[place] if place < len(Foreign.script) else True)
        return Foreign.asked[-1]

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _answer

    def __hash__(self):
        return 0


class Careful(float):
    """Number of the program that is infinite, or would soon be. It equals and orders as others do, but no tolerance can
    be computed from it: what is infinite after arithmetic is not a number, and that has no order.
    """


def careful(text):
    value = float(text)
    return value if abs(value) < 1e150 else Careful(value)


def _computed(name):
    def method(self, *others):
        value = getattr(float, name)(self, *others)
        return careful(value if math.isfinite(value) else "nan") if isinstance(value, float) else value

    return method


def _ordered(name):
    def method(self, other):
        if math.isnan(self) or (isinstance(other, float) and math.isnan(other)):
            raise ValueError("what is not a number has no order")
        return getattr(float, name)(self, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Careful, f"__{_name}__", _computed(f"__{_name}__"))
    setattr(Careful, f"__r{_name}__", _computed(f"__r{_name}__"))
for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Careful, _name, _ordered(_name))
for _name in ("__abs__", "__neg__", "__pos__"):
    setattr(Careful, _name, lambda self, name=_name: Careful(getattr(float, name)(self)))
DECODERS = {"other": Foreign, "float": careful}


def apart_told(judge):
    """Return whether an assertion holds; None if that depends on what objects of the program are equal."""
    found, scripts, left = set(), [[]], 256
    while scripts and left and len(found) < 2:
        left -= 1
        Foreign.script, Foreign.asked = scripts.pop(), []
        try:
            answer = judge()
            found.add(answer is not NotImplemented and bool(answer))
        except NameError:
            raise
        except Exception:  # noqa: BLE001  whatever the program's values lead to
            found.add(False)
        asked = Foreign.asked
        if len(asked) > 64:  # too many to try others: what fails if all are equal fails
            return False if found == {False} else None
        scripts += [[*asked[:at], not asked[at]] for at in range(len(Foreign.script), len(asked))]
    return None if scripts or len(found) > 1 else found.pop()


def apart_almost(first, second, limit):
    """Whether two values are equal, or differ by ``limit`` at most."""
    return first == second or abs(first - second) <= limit


def apart_close(found, wanted, relative, absolute):
    """Whether numbers, or lists of them, are close as ``numpy.testing.assert_allclose`` has it."""
    if isinstance(found, (list, tuple)) or isinstance(wanted, (list, tuple)):
        pairs = zip(found, wanted, strict=True)
        return len(found) == len(wanted) and all(apart_close(*pair, relative, absolute) for pair in pairs)
    if not math.isfinite(found) or not math.isfinite(wanted):
        return found == wanted or (found != found and wanted != wanted)
    return abs(found - wanted) <= absolute + relative * abs(wanted)
