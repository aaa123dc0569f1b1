"""The diagnosis of a run: troubles found in its metrics rows."""

from jaxrl_llm.diagnosis.detectors import FindingTracker, diagnose
from jaxrl_llm.diagnosis.findings import Finding

__all__ = ["Finding", "FindingTracker", "diagnose"]
