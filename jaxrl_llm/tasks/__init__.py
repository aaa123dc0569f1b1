"""Tasks: prompts with checkable answers, as values."""

from jaxrl_llm.tasks.collected import Collected, check_collected
from jaxrl_llm.tasks.curriculum import Curriculum, Dropping, EasyToHard, Prioritised, check_curriculum
from jaxrl_llm.tasks.extract import answer_of, extract, integer, normalised, number
from jaxrl_llm.tasks.fingerprint import Fingerprint, difference, fingerprint
from jaxrl_llm.tasks.instructed import Instructions
from jaxrl_llm.tasks.interleaved import Interleaved, of_tasks
from jaxrl_llm.tasks.learned import Learned, Ranked, Stepped, Text, longest
from jaxrl_llm.tasks.loaded_texts import LoadedTexts, check_texts, load_texts
from jaxrl_llm.tasks.resolve import resolve
from jaxrl_llm.tasks.rows import prompt_key
from jaxrl_llm.tasks.scheduled import Scheduled
from jaxrl_llm.tasks.sources import HubDataset, ReasoningGym, Rows, Source, Table, begun
from jaxrl_llm.tasks.stream import PromptStream, Shuffled, problem_index
from jaxrl_llm.tasks.task import Loaded, Task, check, dated, load
from jaxrl_llm.tasks.template import CHATML, Prompts, encode
from jaxrl_llm.tasks.texts import Pairs, Steps, Texts

__all__ = [
    "CHATML",
    "Collected",
    "Curriculum",
    "Dropping",
    "EasyToHard",
    "Fingerprint",
    "HubDataset",
    "Instructions",
    "Interleaved",
    "Learned",
    "Loaded",
    "LoadedTexts",
    "Pairs",
    "Prioritised",
    "PromptStream",
    "Prompts",
    "Ranked",
    "ReasoningGym",
    "Rows",
    "Scheduled",
    "Shuffled",
    "Source",
    "Stepped",
    "Steps",
    "Table",
    "Task",
    "Text",
    "Texts",
    "answer_of",
    "begun",
    "check",
    "check_collected",
    "check_curriculum",
    "check_texts",
    "dated",
    "difference",
    "encode",
    "extract",
    "fingerprint",
    "integer",
    "load",
    "load_texts",
    "longest",
    "normalised",
    "number",
    "of_tasks",
    "problem_index",
    "prompt_key",
    "resolve",
]
