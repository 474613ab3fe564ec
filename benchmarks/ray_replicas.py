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
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import codd
from codd_lab.provenance import provenance
from serving import WAYS, Request, Seen, all_of, client, clients, made, serving, shortened
from timing import save

REPLICA = b"ray::ServeReplica"
"""How the command line of a replica's process begins."""


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
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result here, too")
    args = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("ray_replicas.py: needs Ray: pip install 'codd-lm[ray]'", file=sys.stderr)
        return 2
    requests = made(codd.load(device="cpu"), args.requests, args.seed, [shortened(way, args.shorter) for way in WAYS])
    before = os.getloadavg()
    found = {"throughput": throughput, "kill": kill, "load": load}[args.what](args, requests)
    found = {**provenance("cpu", "float32"), "load_average": [before, os.getloadavg()], **found}
    print(json.dumps(found, indent=1))
    save(found, args.json)
    return 0


def arguments(replicas: int | None, slots: int = 8, queue: int = 32) -> list[object]:
    """Of ``codd serve``, on a Ray cluster of its own or without Ray (None)."""
    found = ["--device", "cpu", "--slots", slots, "--queue", queue, "--drain-timeout", 5]
    return found + ([] if replicas is None else ["--replicas", replicas])


def served(replicas: int | None, slots: int = 8, queue: int = 32) -> AbstractContextManager[tuple[str, int]]:
    """Its URL, and the process that started it."""
    return serving(*arguments(replicas, slots, queue), OMP_NUM_THREADS="1")


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


async def loaded(
    url: str, requests: list[Request], seen: Seen, *, count: int, seconds: float, leaving: int = 0, seed: int = 0
) -> None:
    """So many clients ask for so long; ``leaving`` of them hang up after 0 to 3 seconds each time."""
    end = time.monotonic() + seconds
    async with clients(url) as http:
        kinds = ["leaves"] * leaving + ["asks"] * (count - leaving)
        await asyncio.gather(
            *(client(http, requests, seen, end, random.Random(seed + i), kind) for i, kind in enumerate(kinds))
        )


def throughput(args: argparse.Namespace, requests: list[Request]) -> dict[str, Any]:
    """Requests a second of ``codd serve``, one replica and two, asked in turn.

    Where other processes take the cores, the busiest process's seconds of CPU say what it would be without them.
    """
    kinds = {"codd serve": None, "1 replica": 1, "2 replicas": 2}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    busiest: dict[str, list[float]] = {name: [] for name in kinds}
    shares: dict[str, list[float]] = {name: [] for name in kinds}
    seen = Seen()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served(n, args.slots, args.queue)) for name, n in kinds.items()}
        for _ in range(args.rounds):
            for name, (url, _) in servers.items():
                begun, before = time.monotonic(), _cpu_seconds(url)
                asyncio.run(all_of(url, requests, seen, args.clients or 16))
                rates[name].append(len(requests) / (time.monotonic() - begun))
                spent = [after - before[id] for id, after in _cpu_seconds(url).items()]
                busiest[name].append(len(requests) / max(spent))
                shares[name].append(round(max(spent) / sum(spent), 3))
        batches = {name: _mean_batch(url) for name, (url, _) in servers.items()}
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


def kill(args: argparse.Namespace, requests: list[Request]) -> dict[str, Any]:
    """Kill one of two replicas after a quarter of the time."""
    seconds = args.seconds or 40
    with served(2, args.slots, args.queue) as (url, pid):
        return asyncio.run(_killed(url, pid, requests, args.clients or 8, seconds, args.seed))


async def _killed(url: str, pid: int, requests: list[Request], count: int, seconds: float, seed: int) -> dict[str, Any]:
    seen = Seen()
    work = asyncio.create_task(loaded(url, requests, seen, count=count, seconds=seconds, seed=seed))
    await asyncio.sleep(seconds / 4)
    async with clients(url) as http:
        before = replica_ids((await http.get("/metrics")).text)
        os.kill(replica_pids(pid)[0], signal.SIGKILL)
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
    seconds, count, seen = args.seconds or 60, args.clients or 64, Seen()
    leaving = round(count * args.leave)
    with served(2, args.slots, args.queue) as (url, _):
        asyncio.run(loaded(url, requests, seen, count=count, seconds=seconds, leaving=leaving, seed=args.seed))
        left = _left(url)
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


def _summary(seen: Seen) -> dict[str, Any]:
    """Lost are answers that did not come to their end; neither refused ones nor those whose client left count."""
    lost = sum(count for name, count in seen.statuses.items() if name not in ("200", "429", "left"))
    return {"outcomes": dict(seen.statuses), "lost": lost, "wrong": len(seen.wrong), "wrong_ones": seen.wrong[:3]}


if __name__ == "__main__":
    sys.exit(main())
