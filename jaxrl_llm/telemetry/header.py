"""What a run says of itself before its first step."""

import dataclasses

from jaxrl_llm.telemetry.columns import count


@dataclasses.dataclass(frozen=True)
class Header:
    """The size of a run.

    Attributes:
      model: its name.
      parameters: of the model.
      trained: those that are trained, where an adapter stands in for the model.
      devices: how many, of all processes.
      device: what each is.
      task: its label.
      problems: to learn from.
      held_out: to test on.
      prompts: of one step.
      group: completions of each.
      updates: of the optimiser, from one step's completions.
    """

    model: str
    parameters: int
    trained: int
    devices: int
    device: str
    task: str
    problems: int
    held_out: int
    prompts: int
    group: int
    updates: int

    def lines(self) -> list[str]:
        """Two lines for people."""
        trained = "" if self.trained == self.parameters else f", an adapter of {count(self.trained)} is trained"
        devices = "one device" if self.devices == 1 else f"{self.devices} devices"
        updates = "one update" if self.updates == 1 else f"{self.updates} updates"
        return [
            f"{self.model}: {count(self.parameters)} parameters{trained}, on {devices} ({self.device})",
            f"{self.task}: {self.problems:,} problems, {self.held_out:,} to test on; each step {self.prompts} x "
            f"{self.group} completions, {updates}",
        ]
