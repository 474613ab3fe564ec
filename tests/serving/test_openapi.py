"""Requests made from the OpenAPI document, right ones and wrong ones: none is answered with a 500, and none lost."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from codd.decoding import Options
from codd.decoding.options import OPTIONS, UNTYPED
from codd.serving.app import Settings
from codd.serving.prompts import Limits
from tests.support.live import PATIENCE, Live, live

EXAMPLES = int(os.environ.get("CODD_FUZZ", "12"))
STATUSES = {200, 400, 404, 405, 406, 413, 415, 422, 429, 504}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Short texts, so that what is answered is answered soon."""
    with live(settings=Settings(name="mini", limits=Limits(Options(gen_length=4, steps=2), length=24))) as found:
        yield found
        found.until_idle()
        assert found.http.get("/health").json()["status"] == "ok"


@pytest.fixture(scope="module")
def document(server: Live) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/denoise", "/v1/inspect", "/v1/constraint", "/v1/decisions"),
        *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    ],
)
def test_no_request_makes_the_server_fail(server, document, path, mode):
    seen: Counter[int] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=document[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "mini"  # the document cannot say what models are called
        response = case.call(timeout=PATIENCE)
        assert response.status_code in STATUSES, response.text
        seen[response.status_code] += 1
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
    assert sum(seen.values()) >= EXAMPLES / 2
    if mode is GenerationMode.NEGATIVE:
        assert sum(seen[status] for status in seen if status >= 400) >= sum(seen.values()) / 2


def test_the_document_names_every_option(server):
    document = server.http.get("/openapi.json").json()
    fields = document["components"]["schemas"]["DenoiseRequest"]["properties"]
    assert (set(OPTIONS) - set(UNTYPED)) | {"guided_regex", "guided_json", "guided_choice"} <= set(fields)
    assert "response_format" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(document["paths"])
