"""One picture of several plans: python tools/plot_plans.py OUT.svg PLAN.json [PLAN.json ...], as jaxrl-llm plan --json
writes them.
"""

import json
import sys
from pathlib import Path

from jaxrl_llm.plan.picture import draw


def main() -> None:
    """Read the plans and draw them."""
    out, *plans = map(Path, sys.argv[1:])
    draw([json.loads(path.read_text()) for path in plans], out)


if __name__ == "__main__":
    main()
