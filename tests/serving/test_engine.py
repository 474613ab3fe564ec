"""The engine: sequences of all kinds at once, each as if alone; and what happens when something does not go well."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from codd.decoding import Options
from codd.errors import InvalidInput
from codd.serving.engine import Engine
from codd.serving.requests import (
    REQUEST_ID,
    DeadlineExceeded,
    ModelCall,
    ModelFailure,
    QueueFull,
    SequenceRequest,
    ShuttingDown,
)
from tests.support.small_models import Gate, small

PROMPT = [3, 1, 4, 1, 5]
SHORT: dict[str, Any] = {"gen_length": 8, "block_length": 8, "steps": 4}
KINDS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {"gen_length": 16, "block_length": 8, "steps": 8, "temperature": 0.7, "seed": 5}),
    ([7], {"gen_length": 8, "block_length": 8, "sampler": "any_order", "steps": 3}),
    ([9, 9, 2, 1], {"gen_length": 12, "mode": "full", "sampler": "factorized", "temperature": 1.0, "seed": 8}),
    ([4, 4], {"gen_length": 10, "block_length": 5, "sampler": "any_order", "threshold": 0.02}),
    ([5, 6, 7, 8, 9, 10], {"gen_length": 6, "cfg_scale": 0.7, "steps": None, "remasking": "entropy"}),
]


def request(
    prompt: list[int] = PROMPT,
    client: str = "me",
    deadline: float | None = None,
    base: dict[str, Any] = SHORT,
    **options: Any,
) -> SequenceRequest:
    [state] = small().start([prompt], Options.of(**{**base, "stop": False, **options}))
    return SequenceRequest(state, client, deadline)


def running(test: Callable[[Engine], Awaitable[None]], **settings: Any) -> None:
    """Run a test with an engine, and stop it."""

    async def main() -> None:
        engine = Engine(small(), **settings)
        engine.start()
        try:
            await asyncio.wait_for(test(engine), 180)
        finally:
            await engine.close()
        assert (engine.load.running, engine.load.waiting) == (0, 0)

    asyncio.run(main())


async def written(engine: Engine, one: SequenceRequest) -> torch.Tensor:
    with engine.submit([one]):
        last = None
        async for step in one.steps():
            last = step
        assert last is not None
        return last.ids


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def arrived(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.acquire, timeout=180)


def test_a_crowd_of_all_kinds_gets_what_each_would_get_alone():
    alone = [small().generate([prompt], **{"stop": False, **how}).sequences[0] for prompt, how in KINDS]

    async def test(engine: Engine) -> None:
        async def one(number: int) -> bool:
            await asyncio.sleep(0.003 * (number % 7))  # they come while others are under way
            prompt, how = KINDS[number % len(KINDS)]
            made = request(prompt, client=str(number % 3), base={}, **how)
            return torch.equal(await written(engine, made), alone[number % len(KINDS)])

        assert all(await asyncio.gather(*(one(number) for number in range(3 * len(KINDS)))))

    running(test, slots=4, queue=64)


def test_steps_arrive_one_by_one_while_the_sequence_is_under_way():
    async def test(engine: Engine) -> None:
        gate = Gate()
        one = request(hooks=(gate,))
        with engine.submit([one]):
            steps = one.steps()
            for number in range(4):
                gate.open.release()
                step = await anext(steps)
                assert (step.number, step.finished) == (number, number == 3)
            assert [step async for step in steps] == []

    running(test)


def test_sequences_really_share_their_steps():
    async def test(engine: Engine) -> None:
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

    running(test, slots=2)


def test_a_long_sequence_makes_room_for_a_short_one_of_the_same_client():
    long = {"gen_length": 16, "block_length": 16, "steps": 16}
    alone = [small().generate([PROMPT], stop=False, **each).sequences[0].tolist() for each in (long, SHORT)]

    async def test(engine: Engine) -> None:
        engine.turn = 0.0
        gate, ended = Gate(), []

        async def run(name: str, one: SequenceRequest) -> list[int]:
            ids = await written(engine, one)
            ended.append(name)
            return ids.tolist()

        first = asyncio.create_task(run("long", request(base=long, hooks=(gate,))))
        await arrived(gate)
        second = asyncio.create_task(run("short", request()))
        await until(lambda: engine.load.waiting == 1)
        gate.open.release(100)
        assert [await first, await second] == alone
        assert ended == ["short", "long"]

    running(test, slots=1)


def test_a_client_with_one_slot_keeps_it_while_another_has_more_that_wait():
    steps = []

    def note(client: str) -> Callable[..., torch.Tensor]:
        def hook(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            steps.append(client)
            return logits

        return hook

    async def test(engine: Engine) -> None:
        engine.turn = 0.0
        many = [request(client="many", hooks=(note("many"),)) for _ in range(4)]
        one = request(client="one", hooks=(note("one"),))
        with engine.submit([*many, one]):
            assert len([step async for step in one.steps()]) == 4
        first, *_, last = [number for number, client in enumerate(steps) if client == "one"]
        assert last - first <= 7, "it had to wait between its 4 steps, in each of which one other takes part"

    running(test, slots=2)


def test_a_full_queue_refuses_all_of_a_request_or_nothing():
    async def test(engine: Engine) -> None:
        gate = Gate()
        held = request(hooks=(gate,))
        with engine.submit([held]):
            await arrived(gate)
            with engine.submit([request(), request()]):
                assert engine.load.waiting == 2
                with pytest.raises(QueueFull) as busy, engine.submit([request(), request()]):
                    pass
                assert 1 <= busy.value.retry_after <= 60
                assert engine.load.waiting == 2
                with engine.submit([request()]):
                    assert engine.load.waiting == 3
            gate.open.release()

    running(test, slots=1, queue=3)


def test_an_idle_engine_takes_as_many_as_it_has_slots_even_without_a_queue():
    async def test(engine: Engine) -> None:
        assert len(await written(engine, request())) == len(PROMPT) + 8
        with pytest.raises(QueueFull), engine.submit([request(), request()]):
            pass

    running(test, slots=1, queue=0)


def test_who_leaves_frees_the_slot_within_one_step():
    async def test(engine: Engine) -> None:
        gate = Gate()
        gone = request(hooks=(gate,))
        with engine.submit([gone]):
            await arrived(gate)
            other = request()
            waiting = asyncio.create_task(written(engine, other))
            await until(lambda: engine.load.waiting == 1)
        gate.open.release()  # the step that was under way, and no other
        await waiting
        assert gate.reached.acquire(blocking=False) is False
        assert gone.state.evaluations == 1
        assert engine.metrics.evicted.labels("cancelled")._value.get() == 1

    running(test, slots=1)


def test_deadlines_end_what_is_under_way_and_what_waits():
    async def test(engine: Engine) -> None:
        gate = Gate()
        slow, waits = request(hooks=(gate,), deadline=math.inf), request(client="other", deadline=math.inf)
        with engine.submit([slow, waits]):
            await arrived(gate)
            slow.deadline = waits.deadline = time.monotonic()  # it passes while the step is under way
            for late in (slow, waits):
                with pytest.raises(DeadlineExceeded):
                    await anext(late.steps())
            gate.open.release()
            await until(lambda: not (engine.load.running or engine.load.waiting))
        await written(engine, request())

    running(test, slots=1)


def test_a_sequence_that_cannot_go_on_fails_alone():
    def wrong(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits[:, :2]

    async def test(engine: Engine) -> None:
        bad, good = request(hooks=(wrong,)), request()
        with engine.submit([bad, good]):
            with pytest.raises(InvalidInput, match="hook"):
                await anext(bad.steps())
            assert len([step async for step in good.steps()]) == 4

    running(test)


def test_after_a_failure_of_the_model_the_engine_goes_on(caplog):
    def explode(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    async def test(engine: Engine) -> None:
        REQUEST_ID.set("abc")
        bad = request(hooks=(explode,))
        with engine.submit([bad]), pytest.raises(ModelFailure):
            await anext(bad.steps())
        assert engine.load.running == 0
        await written(engine, request())
        assert b"codd_failures_total 1.0" in engine.metrics.text()

    running(test)
    assert "boom" in caplog.text
    assert "request abc: the model failed" in caplog.text


def test_an_unforeseen_error_is_nobody_elses(caplog):
    def explode(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    async def test(engine: Engine) -> None:
        alone = [await written(engine, request(**options)) for options in ({}, {"temperature": 1.0})]
        gate = Gate()
        first, second = request(hooks=(gate,)), request(temperature=1.0)
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
        assert all(torch.equal(each[-1].ids, ids) for each, ids in zip(steps, alone, strict=True))

    running(test)
    assert caplog.text.count("the model failed") == 1


def test_questions_are_answered_between_two_steps():
    async def test(engine: Engine) -> None:
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

    running(test)


def test_what_has_nothing_to_fill_is_done_at_once():
    async def test(engine: Engine) -> None:
        one = request(gen_length=0)
        with engine.submit([one]):
            assert [step async for step in one.steps()] == []

    running(test)


def test_draining_finishes_what_is_here_and_takes_nothing_new():
    async def test(engine: Engine) -> None:
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

    running(test, slots=1)


def test_closing_tells_those_who_still_wait():
    async def test(engine: Engine) -> None:
        gate = Gate()
        first, second = request(hooks=(gate,)), request()
        with engine.submit([first, second]):
            await arrived(gate)
            closing = asyncio.create_task(engine.close())
            await until(lambda: engine._stopped)
            gate.open.release()
            await closing
            with pytest.raises(ShuttingDown):
                _ = [step async for step in first.steps()]
            with pytest.raises(ShuttingDown):
                _ = [step async for step in second.steps()]

    running(test, slots=1)
