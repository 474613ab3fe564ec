"""Replicas on Ray: the deployment's options and metrics; a real cluster of two replicas by hand (-m slow)."""

import argparse
import asyncio
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

import codd
from codd.cli import load, main
from codd.cli.serve import _replicas

ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("3", (3, 3)), ("1-4", (1, 4)), ("2-2", (2, 2))])
def test_the_number_of_replicas(text, expected):
    assert _replicas(text) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--replicas 0", "expected at least 1"),
        ("--replicas 4-2", "expected at least 1, and the smaller number first, found '4-2'"),
        ("--replicas two", "expected a number, or two with - between them, found 'two'"),
        ("--gpus-per-replica 1", "--gpus-per-replica is for --replicas"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options, message, capsys):
    assert main(["serve", *options.split()]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "codd.integrations.ray_serve", raising=False)
    assert main(["serve", "--replicas", "2"]) == 1
    assert "codd serve --replicas needs ray: pip install 'codd-lm[ray]'." in capsys.readouterr().err


@ray
def test_what_ray_is_told(monkeypatch):
    from codd.cli.serve import ray_application

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    options = "--replicas 2 --gpus-per-replica 0.5 --connections 9 --drain-timeout 7"
    fixed = ray_application({"options": options})._bound_deployment
    assert (fixed.name, fixed.num_replicas, fixed.max_ongoing_requests) == ("codd", 2, 9)
    assert fixed.ray_actor_options == {"num_cpus": 3, "num_gpus": 0.5}
    assert fixed._deployment_config.graceful_shutdown_timeout_s == 7
    scaled = ray_application({"options": "--replicas 1-4 --slots 5 --device cpu"})._bound_deployment
    found = scaled._deployment_config.autoscaling_config
    assert (found.min_replicas, found.max_replicas, found.target_ongoing_requests) == (1, 4, 5)
    assert scaled.ray_actor_options["num_gpus"] == 0


@ray
def test_metrics_of_replicas_are_told_apart():
    from prometheus_client import generate_latest

    from codd.integrations.ray_serve import MergedMetrics
    from codd.serving.metrics import Metrics

    first, second = Metrics(), Metrics()
    first.requests.labels("/health", "200").inc(3)
    second.requests.labels("/health", "200").inc(4)
    replicas = {"a": first, "b": second}
    text = generate_latest(MergedMetrics((id, each.registry.collect()) for id, each in replicas.items()))
    lines = text.decode().split("\n")
    assert lines.count("# TYPE codd_requests_total counter") == 1
    assert [line for line in lines if line.startswith("codd_requests_total")] == [
        'codd_requests_total{replica="a",route="/health",status="200"} 3.0',
        'codd_requests_total{replica="b",route="/health",status="200"} 4.0',
    ]


QUESTION = "Mia has 84 stamps. She gives half of them to Tom. How many does she keep?"
LONG: dict[str, Any] = {"prompt": "It was a dark night", "gen_length": 128, "steps": 128}


@cache
def bundled() -> codd.Model:
    return codd.load(device="cpu")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    import ray_replicas

    with ray_replicas.served(2, slots=2, queue=2) as (url, pid):
        yield SimpleNamespace(url=url, pid=pid)


def test_what_the_study_serves_with_is_understood():
    """Whether Ray is here or not: the study itself is run by hand."""
    import ray_replicas
    import serving

    parser, verb = argparse.ArgumentParser(), load("serve")
    verb.configure(parser)
    args = parser.parse_args(serving.serve_command(*ray_replicas.arguments(2, 3, 4))[1:])
    assert (args.replicas, args.slots, args.queue) == ((2, 2), 3, 4)


@cache
def expected(seed: int) -> str:
    model = bundled()
    found = model.generate(
        [[{"role": "user", "content": QUESTION}]], gen_length=16, steps=4, temperature=0.8, seed=seed
    )
    assert found.texts is not None
    return found.texts[0]


def asked(seed: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    options = {"max_tokens": 16, "temperature": 0.8, "seed": seed, "extra_body": {"steps": 4}}
    return {"model": "codd-mini", "messages": messages, **options}


def total(metrics: str, name: str) -> float:
    """A metric, summed over replicas and labels."""
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", metrics, re.M)))


@ray
@pytest.mark.slow
def test_answers_are_those_of_one_process_and_both_replicas_give_them(server):
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20) as client:
            return await asyncio.gather(*(client.chat.completions.create(**asked(seed)) for seed in range(12)))

    answers = asyncio.run(ask())
    assert [each.choices[0].message.content for each in answers] == [expected(seed) for seed in range(12)]
    metrics = httpx.get(f"{server.url}/metrics").text
    finished = re.findall(r'^codd_sequences_total{replica="(\w+)"} (\S+)$', metrics, re.M)
    assert len(dict(finished)) == 2
    assert all(float(count) > 0 for _, count in finished)


@ray
@pytest.mark.slow
def test_streams_are_streams(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chunks = list(client.chat.completions.create(**asked(5), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(5)
    assert chunks[-1].choices[0].finish_reason is not None
    with httpx.stream("POST", f"{server.url}/v1/denoise", json=LONG, timeout=60) as response:
        pieces = list(islice(response.iter_raw(), 5))  # and then the client leaves
    assert len(pieces) == 5
    assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]


@ray
@pytest.mark.slow
def test_every_replica_has_a_queue_of_its_own_and_refuses_when_it_is_full(server):
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            body = {**LONG, "gen_length": 32, "steps": 32, "stream": False}
            return await asyncio.gather(*(http.post("/v1/denoise", json=body) for _ in range(24)))

    before = total(httpx.get(f"{server.url}/metrics").text, "codd_refused_total")
    answers = asyncio.run(ask())
    refused = [each for each in answers if each.status_code == 429]
    assert {each.status_code for each in answers} == {200, 429}
    assert all(int(each.headers["Retry-After"]) >= 1 for each in refused)
    # Two slots and two places in a replica; Ray may send more than their share to one that is quick to refuse.
    assert len(answers) - len(refused) >= 4
    assert total(httpx.get(f"{server.url}/metrics").text, "codd_refused_total") - before == len(refused)


@ray
@pytest.mark.slow
def test_a_killed_replica_costs_its_own_requests_and_is_replaced(server):
    import ray_replicas
    import serving

    async def stream(http: httpx.AsyncClient, started: asyncio.Semaphore) -> str:
        """All of a stream, or what broke it."""
        pieces = []
        try:
            async with http.stream("POST", "/v1/denoise", json={**LONG, "seed": 1}) as response:
                async for piece in response.aiter_text():
                    pieces.append(piece)
                    if len(pieces) == 2:
                        started.release()
        except httpx.RemoteProtocolError as error:
            return type(error).__name__
        return re.findall(r'"text":"(.*?)"', "".join(pieces))[-1]

    async def killed() -> tuple[list[str], str]:
        async with serving.clients(server.url) as http:
            before = ray_replicas.replica_ids((await http.get("/metrics")).text)
            started = asyncio.Semaphore(0)
            streams = []
            for _ in range(4):  # one after the other: each goes where fewer are
                streams.append(asyncio.create_task(stream(http, started)))
                await started.acquire()
            pids = ray_replicas.replica_pids(server.pid)
            assert len(pids) == 2
            os.kill(pids[0], signal.SIGKILL)
            again = await stream(http, started)  # the other replica goes on
            ended = await asyncio.gather(*streams)
            await ray_replicas.until_replaced(http, before)
            return ended, again

    ended, whole = asyncio.run(asyncio.wait_for(killed(), 180))
    broken = ended.count("RemoteProtocolError")
    assert 0 < broken < 4
    assert [each for each in ended if each != "RemoteProtocolError"] == [whole] * (4 - broken)
    assert len(ray_replicas.replica_pids(server.pid)) == 2
