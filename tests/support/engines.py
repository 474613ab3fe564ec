"""An engine of the serving tests, and sequences for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from codd.decoding import Model, Options
from codd.serving.engine import Engine
from codd.serving.requests import SequenceRequest
from tests.support.live import PATIENCE
from tests.support.small_models import Gate, small

PROMPT = [3, 1, 4, 1, 5]
SHORT: dict[str, Any] = {"gen_length": 8, "block_length": 8, "steps": 4}
Kind = tuple[list[int], dict[str, Any]]
Test = Callable[[Engine], Awaitable[None]]


def request(
    prompt: list[int] = PROMPT,
    *,
    client: str = "me",
    deadline: float | None = None,
    model: Model | None = None,
    base: dict[str, Any] = SHORT,
    **options: Any,
) -> SequenceRequest:
    [state] = (model or small()).start([prompt], Options.of(**{**base, "stop": False, **options}))
    return SequenceRequest(state, client, deadline)


def running(test: Test, model: Model | None = None, **settings: Any) -> None:
    """Run a test with an engine, stop it, and see that it holds nothing."""

    async def main() -> None:
        engine = Engine(model or small(), **settings)
        engine.start()
        try:
            await asyncio.wait_for(test(engine), PATIENCE)
        finally:
            await engine.close()
        assert (engine.load.running, engine.load.waiting, engine.load.cache_held) == (0, 0, 0)

    asyncio.run(main())


def on_engine(**settings: Any) -> Callable[[Test], Callable[[], None]]:
    """Make a test of a coroutine on an engine; see `running`."""

    def decorate(test: Test) -> Callable[[], None]:
        return lambda: running(test, **settings)

    return decorate


async def written(engine: Engine, one: SequenceRequest) -> list[int]:
    with engine.submit([one]):
        return [step.ids.tolist() async for step in one.steps()][-1]


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def arrived(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.acquire, timeout=PATIENCE)


def alone(kinds: list[Kind]) -> list[list[int]]:
    """What each gets if there is no other."""
    return [small().generate([prompt], **{"stop": False, **how}).sequences[0].tolist() for prompt, how in kinds]


async def crowd(engine: Engine, kinds: list[Kind], times: int) -> None:
    """Sequences of all kinds, so many of each, get what each would get alone."""

    async def one(number: int) -> list[int]:
        await asyncio.sleep(0.003 * (number % 7))  # they come while others are under way
        prompt, how = kinds[number % len(kinds)]
        return await written(engine, request(prompt, client=str(number % 3), base={}, **how))

    assert await asyncio.gather(*(one(number) for number in range(times * len(kinds)))) == times * alone(kinds)


def noting(steps: list[str], name: str) -> Callable[..., torch.Tensor]:
    """A hook that notes each step under a name."""

    def hook(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        steps.append(name)
        return logits

    return hook


def explode(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A hook that fails as a model would."""
    raise RuntimeError("boom")


def cut(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A hook that returns what cannot be gone on with."""
    return logits[:, :2]
