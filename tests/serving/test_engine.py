"""The engine: sequences of all kinds at once, each as if alone; and what happens when something does not go well."""

import asyncio
import gc
import threading
import weakref

import pytest

from codd.errors import InvalidInput
from codd.serving.engine import Engine
from codd.serving.requests import (
    REQUEST_ID,
    ModelCall,
    ModelFailure,
    QueueFull,
    SequenceRequest,
    ShuttingDown,
)
from tests.support.engines import (
    PROMPT,
    SHORT,
    Kind,
    alone,
    arrived,
    crowd,
    cut,
    eventually,
    explode,
    noting,
    on_engine,
    request,
    running,
    written,
)
from tests.support.small_models import Gate

KINDS: list[Kind] = [
    ([1, 2, 3], {"gen_length": 16, "block_length": 8, "steps": 8, "temperature": 0.7, "seed": 5}),
    ([7], {"gen_length": 8, "block_length": 8, "sampler": "any_order", "steps": 3}),
    ([9, 9, 2, 1], {"gen_length": 12, "mode": "full", "sampler": "factorized", "temperature": 1.0, "seed": 8}),
    ([4, 4], {"gen_length": 10, "block_length": 5, "sampler": "any_order", "threshold": 0.02}),
    ([5, 6, 7, 8, 9, 10], {"gen_length": 6, "cfg_scale": 0.7, "steps": None, "remasking": "entropy"}),
]


def test_a_crowd_of_all_kinds_gets_what_each_would_get_alone():
    running(lambda engine: crowd(engine, KINDS, 3), slots=4, queue=64)


@on_engine()
async def test_steps_arrive_one_by_one_while_the_sequence_is_under_way(engine: Engine) -> None:
    gate = Gate()
    one = request(hooks=(gate,))
    with engine.submit([one]):
        steps = one.steps()
        for number in range(4):
            gate.open.release()
            step = await anext(steps)
            assert (step.number, step.finished) == (number, number == 3)
        assert [step async for step in steps] == []


@on_engine(slots=2)
async def test_sequences_really_share_their_steps(engine: Engine) -> None:
    gate = Gate()
    first, second = request(hooks=(gate,)), request()
    with engine.submit([first, second]):
        await arrived(gate)
        assert engine.load.running == 2
        for _ in range(4):
            gate.open.release()
        async for _ in first.steps():
            pass
        async for _ in second.steps():
            pass
    assert engine.metrics.steps._value.get() == 8
    assert engine.metrics.step_seconds._sum.get() > 0
    samples = {s.name: s.value for m in engine.metrics.batch.collect() for s in m.samples}
    assert samples["codd_batch_size_count"] == 4


@on_engine(slots=1)
async def test_a_long_sequence_makes_room_for_a_short_one_of_the_same_client(engine: Engine) -> None:
    long = {"gen_length": 16, "block_length": 16, "steps": 16}
    engine.turn = 0.0
    gate, ended = Gate(), []

    async def run(name: str, one: SequenceRequest) -> list[int]:
        ids = await written(engine, one)
        ended.append(name)
        return ids

    first = asyncio.create_task(run("long", request(base=long, hooks=(gate,))))
    await arrived(gate)
    second = asyncio.create_task(run("short", request()))
    await eventually(lambda: engine.load.waiting == 1)
    gate.open.release(100)
    assert [await first, await second] == alone([(PROMPT, long), (PROMPT, SHORT)])
    assert ended == ["short", "long"]


@on_engine(slots=2)
async def test_a_client_with_one_slot_keeps_it_while_another_has_more_that_wait(engine: Engine) -> None:
    steps: list[str] = []
    engine.turn = 0.0
    many = [request(client="many", hooks=(noting(steps, "many"),)) for _ in range(4)]
    one = request(client="one", hooks=(noting(steps, "one"),))
    with engine.submit([*many, one]):
        assert len([step async for step in one.steps()]) == 4
    first, *_, last = [number for number, client in enumerate(steps) if client == "one"]
    assert last - first <= 7, "it had to wait between its 4 steps, in each of which one other takes part"


@on_engine(slots=1, queue=3)
async def test_a_full_queue_refuses_all_of_a_request_or_nothing(engine: Engine) -> None:
    gate = Gate()
    held = request(hooks=(gate,))
    with engine.submit([held]):
        await arrived(gate)
        with engine.submit([request(), request()]):
            assert engine.load.waiting == 2
            with pytest.raises(QueueFull) as busy, engine.submit([request(), request()]):
                pass
            assert 1 <= int(busy.value.headers["Retry-After"]) <= 60
            assert engine.load.waiting == 2
            with engine.submit([request()]):
                assert engine.load.waiting == 3
        gate.open.release()


@on_engine(slots=1, queue=0)
async def test_an_idle_engine_takes_as_many_as_it_has_slots_even_without_a_queue(engine: Engine) -> None:
    assert len(await written(engine, request())) == len(PROMPT) + 8
    with pytest.raises(QueueFull), engine.submit([request(), request()]):
        pass


@on_engine()
async def test_a_sequence_that_cannot_go_on_fails_alone(engine: Engine) -> None:
    bad, good = request(hooks=(cut,)), request()
    with engine.submit([bad, good]):
        with pytest.raises(InvalidInput, match="hook"):
            await anext(bad.steps())
        assert len([step async for step in good.steps()]) == 4


def test_an_unforeseen_error_is_nobody_elses(caplog):
    async def test(engine: Engine) -> None:
        expected = [await written(engine, request(**options)) for options in ({}, {"temperature": 1.0})]
        gate = Gate()
        first, second = request(hooks=(gate,)), request(temperature=1.0)
        REQUEST_ID.set("abc")
        bad = request(hooks=(explode,))
        with engine.submit([first]):
            await arrived(gate)
            with engine.submit([bad, second]):
                for _ in range(8):  # a step that failed is made again
                    gate.open.release()
                with pytest.raises(ModelFailure):
                    await anext(bad.steps())
                steps = [[step async for step in one.steps()] for one in (first, second)]
        assert [len(each) for each in steps] == [4, 4]
        assert [each[-1].ids.tolist() for each in steps] == expected
        assert b"codd_failures_total 1.0" in engine.metrics.text()

    running(test)
    assert "boom" in caplog.text
    assert "request abc: the model failed" in caplog.text
    assert caplog.text.count("the model failed") == 1


@on_engine()
async def test_questions_are_answered_between_two_steps(engine: Engine) -> None:
    gate = Gate()
    one, call = request(hooks=(gate,)), ModelCall(lambda: threading.current_thread().name, "me")
    with engine.submit([one]):
        await arrived(gate)
        with engine.submit([call]):
            gate.open.release()
            assert await call.result() == "codd-model"
        assert one.state.evaluations == 1
        for _ in range(3):
            gate.open.release()
        assert len([step async for step in one.steps()]) == 4

    def impossible() -> None:
        raise InvalidInput("no")

    wrong = ModelCall(impossible, "me")
    with engine.submit([wrong]), pytest.raises(InvalidInput):
        await wrong.result()


@on_engine()
async def test_what_has_nothing_to_fill_is_done_at_once(engine: Engine) -> None:
    one = request(gen_length=0)
    with engine.submit([one]):
        assert [step async for step in one.steps()] == []


def test_who_is_given_up_holds_no_memory_until_python_looks_for_cycles():
    async def test(engine: Engine) -> None:
        gate = Gate()
        one = request(steps=8, hooks=(gate,))
        kept = weakref.ref(one.state)
        with engine.submit([one]):
            await arrived(gate)
            gate.open.release(3)
            await anext(one.steps())
        gate.open.release(8)
        await eventually(lambda: not engine.load.running)
        del one
        await eventually(lambda: kept() is None)

    gc.disable()
    try:
        running(test)
    finally:
        gc.enable()


@on_engine(slots=1)
async def test_draining_finishes_what_is_here_and_takes_nothing_new(engine: Engine) -> None:
    gate = Gate()
    first, second = request(hooks=(gate,)), request()
    with engine.submit([first, second]):
        await arrived(gate)
        engine.drain()
        assert engine.draining
        with pytest.raises(ShuttingDown), engine.submit([request()]):
            pass
        for _ in range(4):
            gate.open.release()
        assert len([step async for step in first.steps()]) == 4
        assert len([step async for step in second.steps()]) == 4
    await asyncio.to_thread(engine._thread.join, 10)
    assert not engine._thread.is_alive()


@on_engine(slots=1)
async def test_closing_tells_those_who_still_wait(engine: Engine) -> None:
    gate = Gate()
    first, second = request(hooks=(gate,)), request()
    with engine.submit([first, second]):
        await arrived(gate)
        closing = asyncio.create_task(engine.close())
        await eventually(lambda: engine._stopped)
        gate.open.release()
        await closing
        with pytest.raises(ShuttingDown):
            _ = [step async for step in first.steps()]
        with pytest.raises(ShuttingDown):
            _ = [step async for step in second.steps()]
