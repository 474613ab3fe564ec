"""Replicas on Ray: what two gain over one, and what becomes of the answers when one of them is killed.

    OMP_NUM_THREADS=1 python benchmarks/ray_replicas.py throughput  # codd serve, one replica and two, in turn
    OMP_NUM_THREADS=1 python benchmarks/ray_replicas.py kill        # kill -9 of one of two replicas under load
    OMP_NUM_THREADS=1 python benchmarks/ray_replicas.py load        # 64 clients for 60 s, half of them hang up

Servers are real processes on the bundled model, every replica with one thread. What every request must be answered is
computed beforehand with `model.generate`. An answer is lost if it did not come, or not to its end; it is wrong if it
came and is another one. The load of the machine is printed, as other processes take their share.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import codd
from serving import WAYS, Request, machine, made, shortened

REPLICA = b"ray::ServeReplica"
"""How the command line of a replica's process begins."""


@dataclass(frozen=True)
class Served:
    """A server and the process that started it."""

    url: str
    pid: int


@dataclass
class Outcomes:
    """What became of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    """By status code, exception, or in words."""
    wrong: list[str] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    """When right answers came, in seconds of `time.monotonic`."""

    @property
    def lost(self) -> int:
        """Answers that did not come to their end; neither refused ones nor those whose client left are among them."""
        return sum(count for name, count in self.counts.items() if name not in ("200", "429", "left"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "kill", "load"))
    parser.add_argument("--clients", type=int, help="(default: 16; 8 for kill, 64 for load)")
    parser.add_argument("--seconds", type=float, help="of load (default: 60; 40 for kill)")
    parser.add_argument("--leave", type=float, default=0.5, help="of load: the share that hangs up (default: 0.5)")
    parser.add_argument("--requests", type=int, default=32, help="different ones (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="of throughput (default: 3)")
    parser.add_argument("--shorter", type=int, default=1, help="divides the lengths and steps of all requests")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queue", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the result here, too")
    args = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("ray_replicas.py: needs Ray: pip install 'codd-lm[ray]'", file=sys.stderr)
        return 2
    requests = made(codd.load(device="cpu"), args.requests, args.seed, [shortened(way, args.shorter) for way in WAYS])
    before = os.getloadavg()
    found = {"throughput": throughput, "kill": kill, "load": load}[args.what](args, requests)
    head = {"command": " ".join(sys.argv), "machine": machine(), "load_average": [before, os.getloadavg()]}
    print(json.dumps({**head, **found}, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps({**head, **found}, indent=2) + "\n")
    return 0


def serve_command(replicas: int | None, slots: int, queue: int) -> list[str]:
    """``codd serve`` with its arguments."""
    command = ["serve", "--port", "0", "--json", "--quiet", "--device", "cpu"]
    command += ["--slots", str(slots), "--queue", str(queue), "--drain-timeout", "5"]
    return [*command, *([] if replicas is None else ["--replicas", str(replicas)])]


@contextmanager
def served(replicas: int | None, slots: int = 8, queue: int = 32) -> Iterator[Served]:
    """``codd serve`` on a Ray cluster of its own, or without Ray (None); it must stop cleanly."""
    command = [sys.executable, "-m", "codd", *serve_command(replicas, slots, queue)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield Served(json.loads(process.stdout.readline())["url"], process.pid)
        finally:
            process.terminate()
            code = process.wait(120)
            assert code == 0, f"the server ended with {code}"


def replica_pids(server: int) -> list[int]:
    """The processes of replicas whose cluster the process ``server`` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if (folder / "cmdline").read_bytes().startswith(REPLICA) and server in _ancestors(int(folder.name)):
                found.append(int(folder.name))
    return found


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])  # type: ignore[index]
        yield pid


def replica_ids(metrics: str) -> set[str]:
    """The replicas that have answered for their metrics."""
    return set(re.findall(r'codd_slots\{replica="(\w+)"\}', metrics))


async def ask(http: httpx.AsyncClient, request: Request, seen: Outcomes, *, streamed: bool) -> None:
    """One answer, which is counted and compared; who is refused comes again when it was told to."""
    try:
        response = await http.post("/v1/chat/completions", json={**request.body, "stream": streamed})
    except httpx.HTTPError as error:
        seen.counts[type(error).__name__] += 1
        return
    if response.status_code != 200:
        seen.counts[str(response.status_code)] += 1
        await asyncio.sleep(float(response.headers.get("Retry-After", 0.1)))
        return
    if streamed and not response.text.endswith("data: [DONE]\n\n"):
        seen.counts["a stream without its end"] += 1
        return
    text = _joined(response.text) if streamed else response.json()["choices"][0]["message"]["content"]
    seen.counts["200"] += 1
    seen.finished.append(time.monotonic())
    if text != request.expected:
        seen.wrong.append(f"{request.prompt!r}: expected {request.expected!r}, found {text!r}")


def _joined(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def leave(http: httpx.AsyncClient, request: Request, seen: Outcomes, patience: float) -> None:
    """Ask, and hang up after ``patience`` seconds, in the middle of the stream or before it."""
    try:
        async with asyncio.timeout(patience):
            await ask(http, request, seen, streamed=True)
    except TimeoutError:
        seen.counts["left"] += 1


def clients(url: str) -> httpx.AsyncClient:
    """Without limits of connections; none is kept, so that none is closed by the server when it is used again."""
    return httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
    )


async def loaded(
    url: str, requests: list[Request], seen: Outcomes, *, count: int, seconds: float, leaving: int = 0, seed: int = 0
) -> None:
    """So many clients ask for so long; ``leaving`` of them hang up after 0 to 3 seconds each time."""
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(seed + number)
        while time.monotonic() < end:
            request = rng.choice(requests)
            if number < leaving:
                await leave(http, request, seen, rng.uniform(0, 3))
            else:
                await ask(http, request, seen, streamed=rng.random() < 0.5)

    async with clients(url) as http:
        await asyncio.gather(*(client(number) for number in range(count)))


def throughput(args: argparse.Namespace, requests: list[Request]) -> dict[str, Any]:
    """Requests a second of ``codd serve``, one replica and two, asked in turn.

    Where other processes take the cores, the busiest process's seconds of CPU say what it would be without them.
    """
    kinds = {"codd serve": None, "1 replica": 1, "2 replicas": 2}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    busiest: dict[str, list[float]] = {name: [] for name in kinds}
    shares: dict[str, list[float]] = {name: [] for name in kinds}
    seen = Outcomes()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served(n, args.slots, args.queue)) for name, n in kinds.items()}
        for _ in range(args.rounds):
            for name, server in servers.items():
                begun, before = time.monotonic(), _cpu_seconds(server.url)
                asyncio.run(_all_of(server.url, requests, seen, args.clients or 16))
                rates[name].append(len(requests) / (time.monotonic() - begun))
                spent = [after - before[id] for id, after in _cpu_seconds(server.url).items()]
                busiest[name].append(len(requests) / max(spent))
                shares[name].append(round(max(spent) / sum(spent), 3))
        batches = {name: _mean_batch(server.url) for name, server in servers.items()}
    return {
        "requests_per_second": {name: round(median(each), 2) for name, each in rates.items()},
        "ratio": _ratios(rates),
        "requests_per_cpu_second_of_the_busiest": {name: round(median(each), 2) for name, each in busiest.items()},
        "ratio_by_cpu": _ratios(busiest),
        "share_of_the_busiest": shares,
        "sequences_in_a_step": batches,
        **_summary(seen),
    }


def _ratios(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of every round."""
    return {
        f"{a} / {b}": [round(x / y, 2) for x, y in zip(rates[a], rates[b], strict=True)]
        for a, b in (("2 replicas", "1 replica"), ("1 replica", "codd serve"))
    }


def _mean_batch(url: str) -> float:
    """Sequences that shared a step, on average over all steps of all replicas."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    sums = [sum(map(float, re.findall(rf"^codd_batch_size_{part}\S* (\S+)$", text, re.M))) for part in ("sum", "count")]
    return round(sums[0] / sums[1], 2)


def _cpu_seconds(url: str) -> dict[str, float]:
    """By replica."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {id: float(spent) for id, spent in re.findall(r"^process_cpu_seconds_total(\S*) (\S+)$", text, re.M)}


async def _all_of(url: str, requests: list[Request], seen: Outcomes, count: int) -> None:
    """Every request once, from ``count`` clients."""
    left = list(requests)

    async def client() -> None:
        while left:
            await ask(http, left.pop(), seen, streamed=False)

    async with clients(url) as http:
        await asyncio.gather(*(client() for _ in range(count)))


def kill(args: argparse.Namespace, requests: list[Request]) -> dict[str, Any]:
    """Kill one of two replicas after a quarter of the time."""
    seconds = args.seconds or 40
    with served(2, args.slots, args.queue) as server:
        return asyncio.run(_killed(server, requests, args.clients or 8, seconds, args.seed))


async def _killed(server: Served, requests: list[Request], count: int, seconds: float, seed: int) -> dict[str, Any]:
    seen = Outcomes()
    work = asyncio.create_task(loaded(server.url, requests, seen, count=count, seconds=seconds, seed=seed))
    await asyncio.sleep(seconds / 4)
    async with clients(server.url) as http:
        before = replica_ids((await http.get("/metrics")).text)
        os.kill(replica_pids(server.pid)[0], signal.SIGKILL)
        killed = time.monotonic()
        recovered = await until_replaced(http, before)
    await work
    after = [each for each in seen.finished if each > killed]
    return {
        "seconds_to_the_next_answer": round(min(after) - killed, 2) if after else None,
        "seconds_until_two_replicas": round(recovered - killed, 1),
        "answers_meanwhile": sum(each < recovered for each in after),
        **_summary(seen),
    }


async def until_replaced(http: httpx.AsyncClient, before: set[str]) -> float:
    """Wait until there are as many replicas as ``before``, one of them new; when that was, by `time.monotonic`."""
    while True:
        with suppress(httpx.HTTPError):
            now = replica_ids((await http.get("/metrics")).text)
            if len(now) == len(before) and now != before:
                return time.monotonic()
        await asyncio.sleep(0.25)


def load(args: argparse.Namespace, requests: list[Request]) -> dict[str, Any]:
    """Many clients, some of which hang up; at the end nothing may be left in any replica."""
    seconds, count, seen = args.seconds or 60, args.clients or 64, Outcomes()
    leaving = round(count * args.leave)
    with served(2, args.slots, args.queue) as server:
        asyncio.run(loaded(server.url, requests, seen, count=count, seconds=seconds, leaving=leaving, seed=args.seed))
        left = _left(server.url)
    return {"clients": count, "leaving": leaving, "seconds": seconds, **_summary(seen), "left_in_replicas": left}


def _left(url: str) -> float:
    """Sequences that run or wait anywhere, once those who left last have been noticed."""
    for _ in range(50):
        text = httpx.get(f"{url}/metrics", timeout=30).text
        left = sum(map(float, re.findall(r"^codd_(?:running|waiting)\{.*\} (\S+)$", text, re.M)))
        if not left:
            break
        time.sleep(0.1)
    return left


def _summary(seen: Outcomes) -> dict[str, Any]:
    return {"outcomes": dict(seen.counts), "lost": seen.lost, "wrong": len(seen.wrong), "wrong_ones": seen.wrong[:3]}


if __name__ == "__main__":
    sys.exit(main())
