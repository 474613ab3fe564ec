from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from codd.serving.app import Settings
from codd.serving.prompts import Limits
from tests.support.live import Live, live


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    """The bundled model, for all modules that need nothing of their own; slow machines compile slowly."""
    with live(settings=Settings(name="mini", limits=Limits(compile_seconds=60.0))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, of the module's server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found
