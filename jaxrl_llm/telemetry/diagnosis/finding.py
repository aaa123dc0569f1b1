"""What is said of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """One trouble of a run.

    Attributes:
      kind: its name, such as ``entropy_collapse``.
      step: where it began.
      what: the numbers.
      why: what it commonly means.
      remedy: the setting to change.
    """

    kind: str
    step: int
    what: str
    why: str
    remedy: str
