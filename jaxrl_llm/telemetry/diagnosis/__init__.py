"""What goes wrong in a run, found in its rows."""

from jaxrl_llm.telemetry.diagnosis.finding import Finding
from jaxrl_llm.telemetry.diagnosis.rules import diagnose

__all__ = ["Finding", "diagnose"]
