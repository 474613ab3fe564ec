"""KV caches in the server: each answer as if alone, in turns where there are few; and every one is given back."""

import asyncio
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import codd
from codd.cli import main
from codd.decoding import Model
from codd.errors import InvalidInput
from codd.serving.engine import Engine
from codd.serving.requests import DeadlineExceeded, ModelFailure, ShuttingDown
from tests.support import engines
from tests.support.engines import (
    PROMPT,
    Kind,
    Test,
    alone,
    arrived,
    crowd,
    cut,
    eventually,
    explode,
    noting,
    running,
    written,
)
from tests.support.live import PATIENCE, gated, live, raw, until
from tests.support.small_models import FIXTURES, Gate, small

STATM = Path("/proc/self/statm")
DUAL: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 4, "cache": "dual", "stop": False}
KINDS: list[Kind] = [
    ([1, 2, 3], {"gen_length": 16, "block_length": 8, "steps": 8, "temperature": 0.7, "seed": 5, "cache": "prefix"}),
    ([7], {"gen_length": 8, "block_length": 4, "sampler": "any_order", "steps": 6, "cache": "dual"}),
    ([9, 9, 2, 1], {"gen_length": 12, "mode": "full", "sampler": "factorized", "temperature": 1.0, "seed": 8}),
    ([4, 4], {"gen_length": 30, "block_length": 5, "threshold": 0.02, "cache": "dual", "refresh": 2}),
    ([5, 6, 7, 8, 9, 10], {"gen_length": 6, "cfg_scale": 0.7, "steps": None, "cache": "prefix"}),
    ([8, 1] * 20, {"gen_length": 9, "block_length": 3, "steps": 6, "cache": "dual", "cfg_scale": 0.3}),
]


@cache
def block_causal() -> Model:
    return codd.load(FIXTURES / "sdar", circuit=None, device="cpu")


def memory(slots: int, model: Model, length: int) -> int:
    """Bytes for so many sequences."""
    return slots * model.backbone.config.kv_shape.bytes_of(length, model.backbone.dtype)


request = partial(engines.request, base=DUAL)


def cached(test: Test, *, caches: int, model: Model | None = None, **settings: Any) -> None:
    """Run a test with an engine of so many caches."""
    served = model or small()

    async def checked(engine: Engine) -> None:
        assert engine.load.cache_slots == min(caches, 2 * engine.slots)
        await test(engine)

    running(checked, served, cache_memory=memory(caches, served, 64), cache_length=64, **settings)


@pytest.mark.parametrize(("caches", "slots", "turn"), [(2, 4, 0.0), (3, 2, 0.0), (8, 4, 2.0)])
def test_a_crowd_gets_what_each_would_get_alone_however_few_caches_there_are(caches, slots, turn):
    async def test(engine: Engine) -> None:
        engine.turn = turn
        await crowd(engine, KINDS, 2)

    cached(test, caches=caches, slots=slots)


def test_who_waits_for_two_caches_is_not_overtaken_by_those_who_need_one():
    steps: list[str] = []

    async def test(engine: Engine) -> None:
        gate = Gate()
        first = request(hooks=(gate,))
        guided = request(client="guided", cfg_scale=0.5, hooks=(noting(steps, "guided"),))
        later = [request(client=str(each), hooks=(noting(steps, "later"),)) for each in range(3)]
        whole = request(client="whole", cache=None, hooks=(noting(steps, "whole"),))
        with engine.submit([first]):
            await arrived(gate)
            gate.open.release(4)
            await asyncio.gather(*(written(engine, each) for each in (guided, *later, whole)))
        assert steps[:3] == ["whole"] * 3, "what needs no cache did wait for one"
        assert [name for name in steps if name != "whole"] == ["guided"] * 4 + ["later"] * 12

    cached(test, caches=2, slots=4)


def test_a_sequence_that_left_the_batch_for_a_while_keeps_its_cache():
    async def test(engine: Engine) -> None:
        engine.turn = 0.0
        gate = Gate()
        long = asyncio.create_task(written(engine, request(steps=8, hooks=(gate,))))
        await arrived(gate)
        short = request()
        with engine.submit([short]):
            gate.open.release()
            await anext(short.steps())
            assert engine.load.cache_held == 2
        gate.open.release(8)
        assert [await long] == alone([(PROMPT, {**DUAL, "steps": 8})])

    cached(test, caches=2, slots=1)


@pytest.mark.parametrize("why", ["cancelled", "late", "wrong", "failed", "closing"])
@pytest.mark.parametrize("in_batch", [True, False])
def test_every_way_out_gives_the_cache_back(why, in_batch, caplog):
    hooks = {"wrong": (cut,), "failed": (explode,)}.get(why, ())

    async def test(engine: Engine) -> None:
        gate = Gate()
        one = request(steps=8, hooks=(gate, *hooks))
        other = request(hooks=(gate,))
        with engine.submit([one]):
            await arrived(gate)
            engine.turn = 2.0 if in_batch else 0.0  # it leaves the batch for the other one, and keeps its cache
            with engine.submit([other]):
                errors = {"wrong": InvalidInput, "failed": ModelFailure}
                if not in_batch and why not in errors:
                    gate.open.release()
                    await eventually(lambda: other in engine._running)
                    assert (one in engine._running, engine.load.cache_held) == (False, 2)
                if why == "cancelled":
                    engine.cancel([one])
                elif why == "late":
                    one.deadline = 0.0
                elif why == "closing":
                    closing = asyncio.create_task(engine.close())
                    await eventually(lambda: engine._stopped)
                gate.open.release(20)
                if why == "closing":
                    await closing
                if why != "cancelled":
                    errors |= {"late": DeadlineExceeded, "closing": ShuttingDown}
                    with pytest.raises(errors[why]):
                        _ = [step async for step in one.steps()]
                await eventually(lambda: one.state not in engine.runner._held)
                if why != "closing":
                    assert len([step async for step in other.steps()]) == 4

    cached(test, caches=2, slots=1)


def test_a_pass_that_fails_is_made_once_more_with_the_cache_as_it_was(monkeypatch):
    """A full pass that begins a block must not count as made, nor one between two of them twice."""
    kinds = [each for each in KINDS if each[1].get("cache")]
    expected = alone(kinds)
    real, calls = small().backbone.cached_states, iter(range(10**6))

    def failing(*arguments: Any) -> torch.Tensor:
        if next(calls) % 5 == 2:
            raise RuntimeError("boom")
        return real(*arguments)

    async def test(engine: Engine) -> None:
        monkeypatch.setattr(small().backbone, "cached_states", failing)
        asked = [request(prompt, base={}, **how) for prompt, how in kinds]
        found = await asyncio.gather(*(written(engine, one) for one in asked), return_exceptions=True)
        right = [ids == wanted for ids, wanted in zip(found, expected, strict=True) if isinstance(ids, list)]
        assert right == [True] * len(right)
        assert len(right) > 1, "all failed twice in a row"
        assert all(isinstance(each, list | ModelFailure) for each in found)

    cached(test, caches=8, slots=8)


@pytest.mark.parametrize("options", [{}, {"cfg_scale": 0.5}, {"gen_length": 60, "threshold": 0.01}])
def test_a_block_causal_network_does_without_a_cache_where_there_is_none(options):
    model = block_causal()
    told = {"gen_length": 11, "stop": False, "threshold": 0.5, **options}
    expected = model.generate([PROMPT], **told).sequences[0].tolist()
    seen = []
    for caches in (0, 1, 2):

        async def test(engine: Engine) -> None:
            before = engine.metrics.positions.labels("cached")._value.get()
            assert await written(engine, request(model=model, base=told)) == expected
            seen.append(engine.metrics.positions.labels("cached")._value.get() > before)

        cached(test, caches=caches, slots=1, model=model)
    assert seen == [False, "cfg_scale" not in options and "gen_length" not in options, "gen_length" not in options]


def test_a_network_that_can_use_no_cache_takes_no_memory():
    mdlm = codd.load(FIXTURES / "mdlm", circuit=None, device="cpu")
    assert Engine(mdlm).load.cache_slots == 0


@pytest.mark.skipif(not STATM.exists(), reason="only Linux says in this file what a process holds")
def test_caches_that_nobody_uses_hold_no_memory():
    def held() -> int:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    Engine(small(), cache_memory=0)  # what is loaded with it holds some
    before = held()
    engine = Engine(small(), slots=2_000, cache_memory=2**29)
    assert engine.runner.memory.memory.nbytes > 2**28
    assert held() - before < 2**26


BODY = {"prompt": PROMPT, **DUAL}


def test_a_stream_that_is_cut_frees_its_cache_and_what_waits_goes_on():
    gate = Gate()
    with live(small(), gated(gate), slots=2, cache_memory=memory(1, small(), 64), cache_length=64) as server:
        with server.connect() as wire:
            wire.sendall(raw(BODY))
            assert gate.reached.acquire(timeout=PATIENCE)
            gate.open.release()
            received = b""
            while b"event: step" not in received:
                received += wire.recv(65536)
            assert gate.reached.acquire(timeout=PATIENCE)
            [cut] = server.engine._running
            assert server.http.get("/health").json()["cache_held"] == 1
            assert "codd_cache_held 1.0" in server.http.get("/metrics").text
        until(lambda: cut.cancelled)
        gate.open.release(100)
        server.until_idle()
        assert server.engine.load.cache_held == 0
        answer = server.http.post("/v1/denoise", json={**BODY, "stream": False}).json()
        assert answer["done"]["cached"] == sum(step["cached"] for step in answer["steps"]) > 0


def test_positions_are_counted():
    """Two blocks of 4 after 5 tokens, two steps each: a full pass of 13, then the block alone."""
    with live(small(), cache_memory=memory(4, small(), 64), cache_length=64) as server:
        answer = server.http.post("/v1/denoise", json={**BODY, "stream": False}).json()
        assert [(step["computed"], step["cached"]) for step in answer["steps"]] == [(13, 0), (4, 9)] * 2
        assert (answer["done"]["computed"], answer["done"]["cached"]) == (34, 18)
        server.until_idle()
        text = server.http.get("/metrics").text
        for line in ("computed", 34.0), ("cached", 18.0):
            assert 'codd_positions_total{{source="{}"}} {}'.format(*line) in text
        assert "codd_cache_slots 4.0" in text
        assert "codd_cache_held 0.0" in text


@pytest.mark.parametrize(
    ("caches", "body", "words"),
    [
        (0, {}, "0 slots"),
        (1, {"cfg_scale": 1.0}, "takes 2 slots"),
        (1, {"gen_length": 60, "block_length": 20}, "65 positions"),
    ],
)
def test_what_never_fits_is_refused_by_name(caches, body, words):
    with live(small(), cache_memory=memory(caches, small(), 64), cache_length=64) as server:
        for stream in (True, False):
            refused = server.http.post("/v1/denoise", json={**BODY, **body, "stream": stream})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "cache"
            assert words in error["message"]
            assert "--cache-memory" in error["message"]
        assert server.http.post("/v1/denoise", json={**BODY, **body, "cache": None}).status_code == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cache-memory", "-1"], "--cache-memory: must be"),
        (["--cache-memory", "nan"], "--cache-memory: must be"),
        (["--cache-memory", "0", "--cache", "dual"], "no KV cache of 4096 positions"),
    ],
)
def test_a_server_that_could_answer_nothing_does_not_start(flags, words, capsys):
    command = ["serve", "--port", "0", "--model", str(FIXTURES / "llada_mha"), "--circuit", "none", *flags]
    assert main(command) != 0
    assert words in capsys.readouterr().err
