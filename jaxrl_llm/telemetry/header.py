"""What a run says of itself before its first step."""

from jaxrl_llm.telemetry.columns import count


def model_line(model: str, parameters: int, trained: int, devices: int, device: str) -> str:
    """The model and the machine.

    Args:
      model: its name.
      parameters: of the model.
      trained: those that are trained, where an adapter stands in for the model.
      devices: how many, of all processes.
      device: what each is.
    """
    adapter = "" if trained == parameters else f", an adapter of {count(trained)} is trained"
    on = "one device" if devices == 1 else f"{devices} devices"
    return f"{model}: {count(parameters)} parameters{adapter}, on {on} ({device})"


def steps_line(task: str, problems: int, held_out: int, prompts: int, group: int, updates: int) -> str:
    """The task, and the size of a step.

    Args:
      task: its label.
      problems: to learn from.
      held_out: to test on.
      prompts: of one step.
      group: completions of each.
      updates: of the optimiser, from one step's completions.
    """
    often = "one update" if updates == 1 else f"{updates} updates"
    return f"{task}: {problems:,} problems, {held_out:,} to test on; each step {prompts} x {group} completions, {often}"
