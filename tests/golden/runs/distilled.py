"""The run of ``sft.py`` teaches on the student's own completions, with a reward beside."""

import dataclasses

from judged import config as judged

from jaxrl_llm import Distillation
from jaxrl_llm.config import Evaluation, Scoring
from jaxrl_llm.rewards import Format

config = dataclasses.replace(
    judged,
    scoring=Scoring((Format(".*[0-9].*"),), distillation=Distillation("sft", divergence="reverse_kl")),
    evaluation=Evaluation(limit=2),
)
