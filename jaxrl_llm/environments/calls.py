"""Tool calls in the model's replies."""

import dataclasses

from jaxrl_llm.environments.environment import Message


@dataclasses.dataclass(frozen=True)
class Parsed:
    """One reply of the model.

    Attributes:
      message: role assistant, content (the text without the calls), and ``tool_calls`` if there are any.
      error: why a call cannot be parsed; empty if all can.
    """

    message: Message
    error: str = ""
