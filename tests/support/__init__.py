"""What tests share: small models and data, truths by enumeration, servers, and where the files are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
PYTHONPATH = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
"""Of processes that import from ``tests``."""
