"""The golden run of direct preference optimisation, many times as long: a reference that is scored once."""

import dataclasses
from pathlib import Path

from jaxrl_llm.config import Evaluation, load_config

golden = load_config(str(Path(__file__).parents[2] / "golden" / "runs" / "dpo.py"))[1]
config = dataclasses.replace(golden, evaluation=Evaluation(every=20), steps=80)
