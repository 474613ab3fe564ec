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


def test_threads_do_not_spin_for_long():
    assert spin(SHOW) == "3000"


@pytest.mark.parametrize(
    ("environment", "wanted"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")]
)
def test_what_the_user_sets_stays(environment, wanted):
    assert spin(SHOW, **environment) == wanted


def test_it_is_too_late_once_pytorch_is_loaded():
    assert spin(f"import torch; {SHOW}") == "None"
