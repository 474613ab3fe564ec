import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

pytest.register_assert_rewrite("tests.support")  # before anything of it is imported
from tests.support import checking  # noqa: E402

if not torch.cuda.is_available():
    # The kernels then run in Triton's interpreter; it must be chosen before they are compiled.
    os.environ["TRITON_INTERPRET"] = "1"
THREADS = os.environ.get("CODD_TEST_THREADS", "1")  # make test runs two processes on two cores
torch.set_num_threads(int(THREADS))
os.environ.setdefault("OMP_NUM_THREADS", THREADS)  # of the processes that tests start

# The same examples in every run, and no time limit for one: another process may keep the core busy.
# New examples are looked for with --hypothesis-profile=explore.
if importlib.util.find_spec("hypothesis"):  # it and beartype are not on every machine with a GPU
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("explore", derandomize=False, deadline=None)
    settings.load_profile("fixed")

# Shapes and types in signatures are checked while testing, and only then. Kernels are compiled from their source, which
# the hook would change.
ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(parts)
    for source in (ROOT / "src", ROOT / "lab")
    for parts in (path.relative_to(source).with_suffix("").parts for path in source.rglob("*.py"))
    if not {"__init__", "__main__", "triton"} & set(parts)
]
if importlib.util.find_spec("beartype"):
    jaxtyping.jaxtyped = checking.first_calls
    jaxtyping.install_import_hook(MODULES, "beartype.beartype")

    def pytest_runtest_setup() -> None:
        checking.next_test()


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Without jaxtyping's checks, which would be first to complain of wrong types."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def int8_cpu() -> None:
    """Skip where the CPU has no int8 products."""
    from codd.backbones.quantized import check_cpu
    from codd.errors import InvalidInput

    try:
        check_cpu()
    except InvalidInput as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch in one thread, for tests that compare bytes with those of another process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The order of this run, which -q hides with the rest of the header."""
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None:
        terminalreporter.line(f"in this order again: --randomly-seed={seed}")
