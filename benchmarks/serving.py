"""The server under load: is any answer lost or mixed up, does every slot come back, what does sharing steps gain?

    python benchmarks/serving.py load                       # 64 clients for 60 s; every answer is checked
    python benchmarks/serving.py load --caches              # with KV caches: none, prefix and dual in turn
    python benchmarks/serving.py load --leave 0.5           # half of them hang up at random
    python benchmarks/serving.py load --constrained         # every second answer has to match a pattern
    python benchmarks/serving.py load --clients 16 --mixed 0.5 --leave 0.1 --seconds 600 --plot memory.png
                                                            # half of them ask for everything, and for what is wrong
    python benchmarks/serving.py throughput                 # 8 clients: 8 slots against 1, in turn, in one run

Servers are real processes (``codd serve`` on the bundled model), clients are in this one. What every request must be
answered is computed beforehand with `model.generate`, one prompt at a time. A client that gets 429 comes again after
the time it was told. For the throughput two servers, one of them with a single slot, are asked in turn, so that what
else happens on the machine happens to both.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

import codd
from codd.constraints import Regex
from codd_lab.problems import problems
from codd_lab.provenance import provenance
from timing import save

NAME = "codd-mini"
WAYS: tuple[dict[str, Any], ...] = (
    {"gen_length": 32, "steps": 4, "sampler": "any_order"},
    {"gen_length": 64, "steps": 8, "sampler": "latent", "temperature": 0.7},
    {"gen_length": 64, "threshold": 0.9, "sampler": "any_order"},
    {"gen_length": 48, "steps": 6, "sampler": "factorized", "temperature": 1.0},
    {"gen_length": 40, "steps": 5, "block_length": 20, "sampler": "any_order", "temperature": 0.5},
)
PATTERNS = (r"\d{1,3} (stamps|pens)", r"(yes|no), \d\d", "[a-c]{2,5}")


@dataclass(frozen=True)
class Request:
    """A prompt, its settings, and what must come back."""

    prompt: str
    options: dict[str, Any]
    expected: str

    @property
    def body(self) -> dict[str, Any]:
        """As chat completions."""
        return {"model": NAME, "messages": [{"role": "user", "content": self.prompt}], **self.options}


@dataclass
class Seen:
    """What became of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    """By status code, exception, or in words."""
    seconds: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    """When answers came, in seconds of `time.monotonic`."""
    wrong: list[dict[str, str]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the beginning, and megabytes of the server's process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "throughput"))
    parser.add_argument("--clients", type=int, help="(default: 64 for load, 8 for throughput)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (default: 60)")
    parser.add_argument("--leave", type=float, default=0.0, help="the share of clients that hang up at random")
    parser.add_argument(
        "--mixed", type=float, default=0.0, help="the share of clients that send requests of all routes, and wrong ones"
    )
    parser.add_argument("--caches", action="store_true", help="of load: every third asks for each kind of KV cache")
    parser.add_argument("--constrained", action="store_true", help="of load: every second answer matches a pattern")
    parser.add_argument("--requests", type=int, default=30, help="different ones (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, help="of throughput, on each server (default: 3)")
    parser.add_argument("--shorter", type=int, default=1, help="divides the lengths and steps of all requests")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queue", type=int, default=32)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result here, too")
    parser.add_argument("--plot", metavar="FILE", help="of load: a figure of the server's memory over time")
    args = parser.parse_args()
    found = {**provenance(args.device, "float32"), **(load(args) if args.what == "load" else throughput(args))}
    print(json.dumps(found, indent=1))
    save(found, args.json)


def shortened(way: dict[str, Any], times: int) -> dict[str, Any]:
    """The same settings for an answer of so many times fewer tokens, in as many fewer steps."""
    counts = ("gen_length", "steps", "block_length")
    return {name: max(1, value // times) if name in counts else value for name, value in way.items()}


def made(model: codd.Model, count: int, seed: int, ways: Sequence[dict[str, Any]]) -> list[Request]:
    """Word problems, and what the model says to each alone."""
    prompts = [problem.question for problem in problems(count, split="test", seed=seed)]
    found = []
    for number, prompt in enumerate(prompts):
        options = {**ways[number % len(ways)], "seed": seed + number}
        pattern = options.get("guided_regex")
        how = {name: value for name, value in options.items() if name != "guided_regex"}
        language = None if pattern is None else Regex(pattern)
        texts = model.generate([[{"role": "user", "content": prompt}]], constraint=language, **how).texts
        assert texts is not None
        found.append(Request(prompt, options, texts[0]))
    return found


def serve_command(*more: object) -> list[str]:
    """``codd serve`` with its arguments."""
    return ["serve", "--port", "0", "--json", "--quiet", *map(str, more)]


@contextmanager
def serving(*more: object, **environment: str) -> Iterator[tuple[str, int]]:
    """A server of its own process, its URL and its process; it must stop cleanly."""
    command = [sys.executable, "-m", "codd", *serve_command(*more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"], process.pid
        finally:
            process.terminate()
            code = process.wait(120)
            assert code == 0, f"the server ended with {code}"


def clients(url: str) -> httpx.AsyncClient:
    """Without limits of connections; none is kept.

    The server closes idle ones after 5 s, at the very moment at which one who was told to come again in 5 s may send
    its request.
    """
    return httpx.AsyncClient(
        base_url=url, timeout=300, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
    )


def load(args: argparse.Namespace) -> dict[str, Any]:
    kinds = (None, "prefix", "dual") if args.caches else (None,)
    ways = [{**shortened(way, args.shorter), "cache": kind} for way in WAYS for kind in kinds]
    if args.constrained:
        ways = [each for i, way in enumerate(ways) for each in (way, {**way, "guided_regex": PATTERNS[i % 3]})]
    requests = made(codd.load(device=args.device), args.requests, args.seed, ways)
    with serving("--slots", args.slots, "--queue", args.queue, "--device", args.device) as (url, _):
        seen, health = asyncio.run(_loaded(args, url, requests))
    memory = [megabytes for _, megabytes in seen.memory]
    quarter = max(1, len(memory) // 4)
    if args.plot:
        plot(seen.memory, args.plot)
    return {
        "clients": args.clients or 64,
        "leave": args.leave,
        "mixed": args.mixed,
        "statuses": dict(seen.statuses),
        "wrong": seen.wrong[:5],
        "answers_per_second": seen.statuses["200"] / args.seconds,
        "seconds_median": median(seen.seconds) if seen.seconds else None,
        "memory_mb": {
            "first": memory[0],
            "second_quarter": mean(memory[quarter : 2 * quarter] or memory),
            "last_quarter": mean(memory[-quarter:]),
            "most": max(memory),
        },
        "memory_mb_by_second": seen.memory,
        "health_at_the_end": health,
    }


async def _loaded(args: argparse.Namespace, url: str, requests: list[Request]) -> tuple[Seen, dict[str, Any]]:
    seen = Seen()
    count = args.clients or 64
    async with clients(url) as http:
        leaving, mixed = round(count * args.leave), round(count * args.mixed)
        kinds = ["leaves"] * leaving + ["mixed"] * mixed + ["asks"] * (count - leaving - mixed)
        watch = asyncio.create_task(_memory(http, seen))
        while not seen.memory:  # the first figure is from before the load
            await asyncio.sleep(0.01)
        end = time.monotonic() + args.seconds
        await asyncio.gather(
            *(client(http, requests, seen, end, random.Random(args.seed + i), kind) for i, kind in enumerate(kinds))
        )
        watch.cancel()
        for _ in range(50):  # those who left last are noticed after the step that was under way
            health = (await http.get("/health")).json()
            if not health["running"] and not health["waiting"]:
                break
            await asyncio.sleep(0.1)
    return seen, health


async def client(
    http: httpx.AsyncClient, requests: list[Request], seen: Seen, end: float, rng: random.Random, kind: str
) -> None:
    while time.monotonic() < end:
        request = rng.choice(requests)
        if kind == "leaves":
            await leave(http, request, seen, rng.uniform(0.0, 3.0))
        elif kind == "mixed":
            await _any(http, request, seen, rng)
        else:
            await ask(http, request, seen, streamed=rng.random() < 0.5)


async def ask(http: httpx.AsyncClient, request: Request, seen: Seen, streamed: bool) -> None:
    """One answer, checked against its own seed and prompt; who is refused waits as long as it was told to."""
    begun = time.monotonic()
    try:
        response = await http.post("/v1/chat/completions", json={**request.body, "stream": streamed})
    except httpx.HTTPError as error:
        seen.statuses[type(error).__name__] += 1
        return
    if response.status_code != 200:
        seen.statuses[str(response.status_code)] += 1
        await asyncio.sleep(float(response.headers.get("Retry-After", 0.1)))
    elif streamed and not response.text.endswith("data: [DONE]\n\n"):
        seen.statuses["a stream without its end"] += 1
    else:
        seen.statuses["200"] += 1
        seen.finished.append(time.monotonic())
        seen.seconds.append(seen.finished[-1] - begun)
        text = _joined(response.text) if streamed else response.json()["choices"][0]["message"]["content"]
        if text != request.expected:
            seen.wrong.append({"prompt": request.prompt, "expected": request.expected, "found": text})


def _joined(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def leave(http: httpx.AsyncClient, request: Request, seen: Seen, patience: float) -> None:
    """Ask, and hang up after ``patience`` seconds, in the middle of the stream or before it."""
    try:
        async with asyncio.timeout(patience):
            await ask(http, request, seen, streamed=True)
    except TimeoutError:
        seen.statuses["left"] += 1


async def all_of(url: str, requests: Sequence[Request], seen: Seen, count: int) -> None:
    """Every request once, from ``count`` clients."""
    left = list(requests)

    async def one() -> None:
        while left:
            await ask(http, left.pop(), seen, streamed=False)

    async with clients(url) as http:
        await asyncio.gather(*(one() for _ in range(count)))


async def _any(http: httpx.AsyncClient, request: Request, seen: Seen, rng: random.Random) -> None:
    """A request to some route, right or wrong; its status must be the one that it deserves, or 429."""
    right = {"prompt": request.prompt, **request.options}
    ids = [*range(5, 5 + rng.randrange(1, 200)), *[1] * 16]  # 1: the bundled model's mask
    streamed = rng.random() < 0.5
    status, path, body = rng.choice(
        [
            (200, "/v1/completions", {"model": NAME, **right, "stream": streamed}),
            (200, "/v1/completions", {"model": NAME, **right, "n": 3, "suffix": "That is all."}),
            (200, "/v1/denoise", {**right, "stream": streamed}),
            (200, "/v1/inspect", {"ids": ids, "window": [len(ids) - 16, len(ids)]}),
            (400, "/v1/denoise", {**right, "prompt": "<|eos|>" * 100_000}),
            (400, "/v1/completions", {"model": NAME, "prompt": list(range(8000))}),
            (404, f"/{rng.random()}", {}),
            (404, "/v1/completions", {"model": str(rng.random()), **right}),
            (413, "/v1/denoise", {**right, "prompt": "x" * 1_500_000}),
            (422, "/v1/chat/completions", {**right, str(rng.random()): 1}),
            (422, "/v1/denoise", "{" * rng.randrange(1, 1000)),
            (504, "/v1/denoise", {**right, "stream": False, "timeout": 0.001}),
        ]
    )
    content = body if isinstance(body, str) else json.dumps(body)
    try:
        response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        seen.statuses[f"{status} {type(error).__name__}"] += 1  # 413: the connection is closed before all is read
        return
    seen.statuses[f"{path if status == 200 else 'wrong'} {response.status_code}"] += 1
    if response.status_code == 429:
        await asyncio.sleep(float(response.headers["Retry-After"]))
    elif response.status_code != status:
        seen.wrong.append({"path": path, "expected": str(status), "found": response.text[:200]})


async def _memory(http: httpx.AsyncClient, seen: Seen) -> None:
    """What the server's process holds, every second."""
    begun = time.monotonic()
    while True:
        text = (await http.get("/metrics")).text
        line = next(line for line in text.split("\n") if line.startswith("process_resident_memory_bytes"))
        seen.memory.append((round(time.monotonic() - begun, 1), float(line.split()[1]) / 1e6))
        await asyncio.sleep(1)


def plot(memory: list[tuple[float, float]], path: str) -> None:
    """Draw the memory over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*memory, strict=True), linewidth=1)
    axes.set(xlabel="seconds of load", ylabel="resident memory of the server, MB", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Requests a second of a server that shares steps, and of one that does not."""
    ways = {
        "any_order, 8 tokens per step": {"gen_length": 64, "steps": 8, "sampler": "any_order"},
        "any_order, threshold 0.9": {"gen_length": 64, "threshold": 0.9, "sampler": "any_order"},
        "latent, 4 tokens per step": {"gen_length": 64, "steps": 16, "sampler": "latent"},
        "factorized, 4 tokens per step": {"gen_length": 64, "steps": 16, "sampler": "factorized"},
    }
    model, count = codd.load(device=args.device), args.clients or 8
    found: dict[str, Any] = {"clients": count, "rounds": args.rounds}
    common = "--queue", args.queue, "--device", args.device
    with serving("--slots", args.slots, *common) as (shared, _), serving("--slots", 1, *common) as (alone, _):
        for name, way in ways.items():
            requests = made(model, 2 * count, args.seed, [shortened(way, args.shorter)])
            rates: dict[str, list[float]] = {"shared": [], "alone": []}
            different = 0
            for _ in range(args.rounds):
                for which, url in (("shared", shared), ("alone", alone)):
                    rate, wrong = rate_of(url, requests, count)
                    rates[which].append(rate)
                    different += wrong
            ratios = [a / b for a, b in zip(rates["shared"], rates["alone"], strict=True)]
            found[name] = {
                f"requests_per_second_{args.slots}_slots": median(rates["shared"]),
                "requests_per_second_1_slot": median(rates["alone"]),
                "ratio": median(ratios),
                "answers_that_differ": different,
                "ratios": ratios,
            }
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    return found


def rate_of(url: str, requests: list[Request], count: int) -> tuple[float, int]:
    """Requests per second of ``count`` clients, and how many got another answer.

    On a CPU none may. On a GPU a batch of another shape rounds differently, which can turn the balance.
    """
    seen, begun = Seen(), time.monotonic()
    asyncio.run(all_of(url, requests, seen, count))
    took = time.monotonic() - begun
    assert seen.statuses == {"200": len(requests)}, seen.statuses
    return len(requests) / took, len(seen.wrong)


if __name__ == "__main__":
    main()
