"""Tasks: prompts with checkable answers, as values."""

from jaxrl_llm.tasks.chats import Prompts, encode
from jaxrl_llm.tasks.extract import answer_of, extract, integer
from jaxrl_llm.tasks.instructions import Instructions
from jaxrl_llm.tasks.programs import Programs
from jaxrl_llm.tasks.prompts import difference, fingerprint
from jaxrl_llm.tasks.stream import (
    Curriculum,
    Dropping,
    EasyToHard,
    Prioritised,
    PromptStream,
    Scheduled,
    Shuffled,
    of_tasks,
    problem_index,
)
from jaxrl_llm.tasks.task import (
    HubDataset,
    Loaded,
    ReasoningGym,
    Rows,
    Table,
    Task,
    check,
    generate_ahead,
    load,
)

__all__ = [name for name in globals() if not name.startswith("_")]
