"""The golden run that samples one step ahead of learning, ten times as long."""

import dataclasses
from pathlib import Path

from jaxrl_llm.config import load_config

golden = load_config(str(Path(__file__).parents[2] / "golden" / "runs" / "ahead.py"))[1]
config = dataclasses.replace(golden, scoring=dataclasses.replace(golden.scoring, timeout_s=60.0), steps=40)
