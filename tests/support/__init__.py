"""What tests share: small models and data, truths by enumeration, servers, and where the files are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
PROBLEMS = FIXTURES / "problems"
"""Word problems as files: 120 of the train split, 40 of the test split (`python -m codd_lab.problems`)."""
PYTHONPATH = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
"""Of processes that import from ``tests``."""
