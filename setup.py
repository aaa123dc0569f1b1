"""The one thing that pyproject.toml cannot say: packages are found, and configs/ is shipped as jaxrl_llm.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jaxrl_llm", "jaxrl_llm.*"]), "jaxrl_llm.configs"],
    package_dir={"jaxrl_llm.configs": "configs"},
    package_data={
        "jaxrl_llm": ["py.typed", "plan/published.json"],
        "jaxrl_llm.configs": ["*.jsonl"],
        "jaxrl_llm.telemetry": ["page/*"],
    },
)
