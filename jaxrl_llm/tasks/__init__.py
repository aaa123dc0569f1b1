"""Tasks: prompts with checkable answers, as values."""

from jaxrl_llm.tasks.extract import extract, integer, number
from jaxrl_llm.tasks.resolve import resolve
from jaxrl_llm.tasks.sources import HubDataset, ReasoningGym, Source, Table, prompt_key
from jaxrl_llm.tasks.stream import problem_index
from jaxrl_llm.tasks.task import Loaded, Task, check, load
from jaxrl_llm.tasks.template import CHATML, encode

__all__ = [
    "CHATML", "HubDataset", "Loaded", "ReasoningGym", "Source", "Table", "Task", "check", "encode", "extract",
    "integer", "load", "number", "problem_index", "prompt_key", "resolve",
]
