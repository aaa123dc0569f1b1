"""The exception for wrong input, and helpers for its messages."""

import contextlib
import difflib
from collections.abc import Generator, Iterable


class InputError(ValueError):
    """Wrong input from a person; the message is one line that names the field or file and the remedy. The command line
    prints it and exits with code 2.
    """

    code = 2


class Stopped(InputError):
    """Failure within a run that had begun; the command line prints it and exits with code 3."""

    code = 3


def require(fine: bool, message: str) -> None:
    """Raise InputError with this one-line message unless ``fine``."""
    if not fine:
        raise InputError(message)


@contextlib.contextmanager
def naming(where: object) -> Generator[None]:
    """Begin the message of an InputError within the block with ``where:``, a setting, file or row."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


@contextlib.contextmanager
def as_input_error(what: str, remedy: str) -> Generator[None]:
    """Turn any exception of a library, as versions differ, into the InputError ``what (reason); remedy``."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{what} ({reason}); {remedy}") from None


def one_line(error: BaseException, longest: int | None = None) -> str:
    """Format an error's kind and message on one line of at most ``longest`` characters: ``KeyError: 'answer'``."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:longest]


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str = "", near: float = 0.6) -> str:
    """Return a hint for an unknown name: the nearest known one as a question, or ``otherwise`` if no similarity is at
    least ``near``, from 0 to 1. Capitals count little, and a name of the same letters in another order comes first.

    >>> did_you_mean("gpro", ["gspo", "grpo"])
    'did you mean grpo?'
    """
    names: dict[str, list[str]] = {}
    for candidate in candidates:
        names.setdefault(candidate.lower(), []).append(candidate)
    close = difflib.get_close_matches(name.lower(), names, 3, near)
    close.sort(key=lambda candidate: sorted(candidate) != sorted(name.lower()))
    nearest = difflib.get_close_matches(name, names[close[0]], 1, 0.0) if close else []
    return f"did you mean {nearest[0]}?" if nearest else otherwise


def escape_surrogates(text: str) -> str:
    """Escape characters that no file and no tokenizer can take, such as half a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()
