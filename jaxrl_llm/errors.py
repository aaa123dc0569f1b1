"""The one exception for wrong input."""


class InputError(ValueError):
    """What a person gave cannot be used; the message is one line that names the thing and the remedy.

    The command line prints it and exits with code 2.
    """


def require(fine: bool, message: str) -> None:
    """InputError with this one line unless ``fine``."""
    if not fine:
        raise InputError(message)
