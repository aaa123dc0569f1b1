"""``report.html``: what a person looks at after, and during, a run; one file that opens without a network."""

from jaxrl_llm.telemetry.report.page import page, write_report

__all__ = ["page", "write_report"]
