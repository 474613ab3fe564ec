import os
import subprocess
import sys

import pytest

SHOW = "import os, codd; print(os.environ.get('GOMP_SPINCOUNT'))"


def spin(program: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("program", "environment", "wanted"),
    [
        (SHOW, {"GOMP_SPINCOUNT": "7"}, "7"),
        (SHOW, {"OMP_WAIT_POLICY": "PASSIVE"}, "None"),
        (f"import torch; {SHOW}", {}, "None"),
    ],
)
def test_what_the_user_sets_stays_and_what_is_too_late_is_not_set(program, environment, wanted):
    """What is set otherwise: test_face."""
    assert spin(program, **environment) == wanted
