import pytest

from codd.backbones import Tokenizer
from codd.backbones.loading import BUNDLED
from codd.constraints import Vocabulary, cache


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No test finds what another one has compiled, nor what the user has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache.forget()


@pytest.fixture(scope="session")
def bundled() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(BUNDLED)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def mini(bundled) -> Vocabulary:
    return Vocabulary.of(bundled)


@pytest.fixture(scope="session")
def single_bytes() -> Vocabulary:
    return Vocabulary(tuple(bytes([byte]) for byte in range(256)))
