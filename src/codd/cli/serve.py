"""``codd serve``: a model over HTTP, with a playground."""

import argparse
import contextlib
import json
import logging
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from codd.cli import console, sampling
from codd.cli.lists import add_list
from codd.errors import InvalidInput, MissingDependency

if TYPE_CHECKING:
    from ray.serve import Application

    from codd.serving.app import Settings
    from codd.serving.engine import Engine

NAME = "serve"
HELP = """\
Serves a model over HTTP: OpenAI's /v1/completions, /v1/chat/completions and /v1/responses (streaming and not), our own
/v1/denoise, which streams every step, /v1/models, /health, /metrics, and at / a playground in which the network alone
and the circuit write side by side. Requests share denoising steps, whatever their settings, and get what they would
get alone. Options of sampling are the defaults of requests.

Prints the address once it takes requests (with --json: one object, {"url": ..., "model": ...}), and on stderr one line
per request with its id; texts are logged with --log-text only. Ctrl-C or SIGTERM takes nothing new and finishes what
is under way; a second one leaves at once."""
EXAMPLES = """\
examples:
  codd serve                                   then open http://127.0.0.1:8000
  codd serve --threshold 0.9 --slots 16
  CODD_API_KEY=secret codd serve --host 0.0.0.0 --allow-host models.example.org
  codd serve --replicas 2 --gpus-per-replica 1
  curl -N http://127.0.0.1:8000/v1/denoise -H 'Content-Type: application/json' \\
       -d '{"prompt": "Mia has 84 stamps. She gives away 12 of them. How many are left?", "steps": 16}'"""
KEY = "CODD_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


COUNT, NATURAL, PORT = console.number(int, 1), console.number(int, 0), console.number(int, 0, 65535)
SECONDS, HOUR = console.number(float, 0, above=True), console.number(float, 0, 3600, above=True)
SHARE, MEMORY = console.number(float, 0, 1), console.number(float, 0, 1024, above=True)
HELD = "for KV caches, taken at the start; 0: none (default: 1, on a GPU half of what is free)"
TEXT = "of a text or conversation, if that can fit at all (default: 16 for each token that fits)"
NUMBERS: tuple[tuple[str, str, Callable[[str], float], float | None, str], ...] = (
    ("--port", "PORT", PORT, 8000, "0: one that is free"),
    ("--metrics-port", "PORT", PORT, None, "/metrics and the probes here, too, without a key or a check of the host"),
    ("--slots", "N", COUNT, 8, "sequences that share a step"),
    ("--queue", "N", NATURAL, 64, "sequences that may wait"),
    ("--timeout", "S", SECONDS, 600.0, "seconds a request may take"),
    ("--drain-timeout", "S", NATURAL, 30, "seconds to finish what is under way when stopped"),
    ("--cache-memory", "GIB", console.number(float, 0, 2**20), None, HELD),
    ("--max-length", "N", COUNT, 4096, "tokens of a sequence"),
    ("--max-body", "BYTES", COUNT, 1_000_000, "of a request"),
    ("--max-text", "BYTES", COUNT, None, TEXT),
    ("--max-pattern", "BYTES", COUNT, 1 << 15, "of a regular expression, JSON schema or list of choices"),
    ("--max-states", "N", COUNT, 512, "of its automaton: the work of a step grows with them"),
    ("--compile-timeout", "S", HOUR, 5.0, "seconds of processor time to compile it"),
    ("--compile-memory", "GIB", MEMORY, 1.0, "to compile it, at most"),
    ("--connections", "N", COUNT, 256, "sockets that are held"),
    ("--io-timeout", "S", SECONDS, 30.0, "seconds to send headers, to send a body, and to read an answer"),
)
"""Flags that take a number: metavar, type, default (None: worked out) and help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """A model, how it writes by default, and who may ask it how much."""
    parser.usage = "codd serve [options]"
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, this machine)"
    )
    group.add_argument("--name", help="what clients call the model (default: the folder's name; codd-mini if bundled)")
    for flag, metavar, kind, default, text in NUMBERS:
        shown = "" if default is None else f" (default: {default:.10g})"
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text + shown)
    group.add_argument("--api-key-file", metavar="PATH", help=f"clients must know the key in this file (or in ${KEY})")
    add_list(
        group,
        "--allow-host",
        metavar="NAME",
        default=[],
        help="names by which clients may call the server, beside its addresses; *.NAME or * for any",
    )
    add_list(group, "--cors", metavar="ORIGIN", default=[], help="sites whose pages may call the server")
    group.add_argument(
        "--replicas",
        type=_replicas,
        metavar="N|A-B",
        help="processes on a Ray cluster (RAY_ADDRESS, or one of this machine's own), each with --slots and --queue of "
        "its own; A-B: as many as the load needs",
    )
    group.add_argument(
        "--gpus-per-replica",
        type=SHARE,
        metavar="K",
        help="1, a share of a GPU, or 0: replicas on CPUs, each with OMP_NUM_THREADS threads or 1 "
        "(default: 1 if this machine has a GPU); a replica uses one at most: for more of them, more --replicas",
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="answers that do not depend on who else asks, to the bit, on a GPU too, whose network then sees one "
        "sequence at a time (on a CPU that is so anyway)",
    )
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: one object a line (default: text)"
    )
    group.add_argument("--log-text", action="store_true", help="log what is asked")
    group.add_argument("--quiet", action="store_true", help="log only what goes wrong")
    parser.add_argument("--json", action="store_true", help="print the address as a JSON object")
    sampling.add_arguments(parser, chat=False)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    _check(args)
    try:
        from codd.serving import server
    except ImportError as error:
        raise MissingDependency(f"codd serve needs {error.name}: pip install 'codd-lm[serve]'.") from None
    settings = _settings(args)
    if args.replicas is not None:
        return _run_replicas(args, settings)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(server.listen(args.host, args.port))]
        if args.metrics_port is not None:
            wires.append(stack.enter_context(server.listen(args.host, args.metrics_port)))
            port = wires[1].getsockname()[1]
            settings = replace(settings, security=replace(settings.security, metrics_port=port))
        engine = _engine(args)
        found = server.create_server(
            engine, settings, drain=args.drain_timeout, on_ready=lambda url: _tell(url, settings, args.json)
        )
        found.run(sockets=wires)
        if found.force_exit:  # the model's thread may be in the middle of a step, under which Python cannot end cleanly
            logging.shutdown()
            os._exit(1)
    return 0 if found.started else 1


def _engine(args: argparse.Namespace) -> "Engine":
    """The engine with its model; a replica on Ray calls this in its own process."""
    from codd.serving.engine import Engine
    from codd.serving.logs import configure_logs

    model = sampling.model_from(args)
    if model.mask_id is None:
        raise InvalidInput("this checkpoint does not say which token is the mask, so that nothing can be filled.")
    configure_logs(args.log_format, quiet=args.quiet)
    engine = Engine(
        model,
        slots=args.slots,
        queue=args.queue,
        exact=args.exact,
        cache_memory=None if args.cache_memory is None else int(args.cache_memory * 2**30),
        cache_length=args.max_length,
    )
    default = sampling.options_from(args).cache
    if default is not None and not engine.load.cache_slots:
        raise InvalidInput(
            f"--cache {default}: no KV cache of {args.max_length} positions fits into --cache-memory: "
            "give more, a lower --max-length, or no --cache."
        )
    return engine


def _run_replicas(args: argparse.Namespace, settings: "Settings") -> int:
    from codd.serving import server

    app = _ray_application(args, settings)
    from codd.integrations import ray_serve

    with server.listen(args.host, args.port) as wire:  # whether it is free, or which one is; Ray's proxy binds it
        url, port = server.url_of(wire.getsockname()), wire.getsockname()[1]
    ray_serve.run(app, args.host, port, lambda: _tell(url, settings, args.json))
    return 0


def ray_application(args: dict[str, str]) -> "Application":
    """For Ray's ``serve deploy``: ``import_path: codd.cli.serve:ray_application`` with ``args: {options: ...}``.

    The options are those of ``codd serve``, as they are typed.
    """
    parser = argparse.ArgumentParser(prog="codd serve", allow_abbrev=False)
    configure(parser)
    parsed = parser.parse_args(shlex.split(args.get("options", "")))
    _check(parsed)
    return _ray_application(parsed, _settings(parsed))


def _ray_application(args: argparse.Namespace, settings: "Settings") -> "Application":
    try:
        from codd.integrations.ray_serve import ReplicaOptions, application
    except ImportError as error:
        raise MissingDependency(f"codd serve --replicas needs {error.name}: pip install 'codd-lm[ray]'.") from None
    gpus = args.gpus_per_replica
    if gpus is None:
        gpus = float(torch.cuda.is_available() if args.device is None else args.device.startswith("cuda"))
    args.device = args.device or ("cuda" if gpus else "cpu")  # of the replica's machine, which may have others
    options = ReplicaOptions(
        args.replicas or (1, 1),
        cpus=int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]),
        gpus=gpus,
        target=args.slots,
        most_requests=args.connections,
        drain=args.drain_timeout,
    )
    return application(partial(_engine, args), settings, options)


def _replicas(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    try:
        found = int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or two with - between them, found {text!r}") from None
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"expected at least 1, and the smaller number first, found {text!r}")
    return found


def _tell(url: str, settings: "Settings", as_json: bool) -> None:
    found, port = {"url": url, "model": settings.name}, settings.security.metrics_port
    line = f"{settings.name} is served at {url} (in a browser: the playground)"
    if port is not None:
        found["metrics"] = f"{url.rpartition(':')[0]}:{port}/metrics"
        line += f", its metrics at {found['metrics']}"
    print(json.dumps(found) if as_json else line, flush=True)


def _check(args: argparse.Namespace) -> None:
    if args.replicas is not None and args.metrics_port is not None:
        raise InvalidInput("--metrics-port is of one process: with --replicas, /metrics of the address has them all.")
    if args.gpus_per_replica is not None and args.replicas is None:
        raise InvalidInput("--gpus-per-replica is for --replicas: give both, or --device cuda.")


def _settings(args: argparse.Namespace) -> "Settings":
    from codd.serving.app import Settings
    from codd.serving.middleware import Security
    from codd.serving.prompts import Limits

    key = _key(args)
    if key is None and args.host not in LOCAL:
        console.err().print(
            f"codd: everyone who can reach {args.host} can use this server: set {KEY} to require a key.", style="yellow"
        )
    return Settings(
        name=args.name or ("codd-mini" if args.model is None else Path(args.model).name or str(args.model)),
        about=sampling.about(args),
        # More than can ever wait would be told to come again for ever.
        limits=Limits(
            sampling.options_from(args),
            args.max_length,
            min(Limits.sequences, args.slots + args.queue),
            args.max_text,
            args.max_pattern,
            args.max_states,
            args.compile_timeout,
            int(args.compile_memory * 2**30),
        ),
        security=Security(args.host, tuple(args.allow_host), key, args.max_body, tuple(args.cors)),
        timeout=args.timeout,
        log_text=args.log_text,
        connections=args.connections,
        io_timeout=args.io_timeout,
    )


def _key(args: argparse.Namespace) -> str | None:
    """From a file or the environment, where no list of processes shows it."""
    if args.api_key_file is None:
        key = os.environ.get(KEY, "")
    else:
        key = Path(args.api_key_file).read_text(encoding="utf-8", errors="surrogateescape").strip()
        if not key:
            raise InvalidInput(f"{args.api_key_file}: there is no key in it.")
    if not key.isprintable():  # nor are bytes that are not UTF-8
        raise InvalidInput(f"{args.api_key_file or KEY}: a key is one line of text, which a header can hold.")
    return key or None
