"""How long campaigns are, and what they draw from: ``CAMPAIGN_TIMES=20 CAMPAIGN_SEED=3 pytest -m campaign``."""

import os

TIMES = int(os.environ.get("CAMPAIGN_TIMES", "1"))
"""By which the numbers of inputs, kills and steps are multiplied."""
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
"""Equal seeds give equal inputs."""
PATIENCE_S = 900 * TIMES
"""For one test."""
