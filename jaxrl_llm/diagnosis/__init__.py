"""The diagnosis of a run: troubles found in its metrics rows."""

from jaxrl_llm.diagnosis.detectors import Finding, FindingTracker, diagnose

__all__ = ["Finding", "FindingTracker", "diagnose"]
