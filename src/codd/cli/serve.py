"""``codd serve``: a model over HTTP, with a playground."""

import argparse
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from codd.cli import console, sampling
from codd.errors import InvalidInput, MissingDependency

if TYPE_CHECKING:
    from codd.serving.app import Settings

NAME = "serve"
HELP = """\
Serves a model over HTTP: OpenAI's /v1/completions and /v1/chat/completions (streaming and not), our own
/v1/denoise, which streams every step, /v1/models, /health, /metrics, and at / a playground in which the
network alone and the circuit write side by side. Requests share denoising steps, whatever their settings,
and get what they would get alone. Options of sampling are what is used where a request is silent.

Prints the address once it takes requests (with --json: one object, {"url": ..., "model": ...}), and on
stderr one line a request; never a word of what was asked or answered unless --log-text is given. Ctrl-C or
SIGTERM takes nothing new and finishes what is under way; a second one leaves at once."""
KEY = "CODD_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


def configure(parser: argparse.ArgumentParser) -> None:
    """A model, how it writes by default, and who may ask it how much."""
    parser.usage = "codd serve [options]"
    parser.epilog = """\
examples:
  codd serve                                   then open http://127.0.0.1:8000
  codd serve --threshold 0.9 --slots 16
  CODD_API_KEY=secret codd serve --host 0.0.0.0 --allow-host models.example.org
  curl -N http://127.0.0.1:8000/v1/denoise -H 'Content-Type: application/json' \\
       -d '{"prompt": "What is 7 + 8?", "gen_length": 32, "steps": 8}'"""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, this machine)"
    )
    group.add_argument("--port", type=int, default=8000, help="0: one that is free (default: 8000)")
    group.add_argument("--name", help="what clients call the model (default: the folder's name; codd-mini if bundled)")
    group.add_argument("--slots", type=int, metavar="N", default=8, help="sequences that share a step (default: 8)")
    group.add_argument("--queue", type=int, metavar="N", default=64, help="sequences that may wait (default: 64)")
    group.add_argument(
        "--timeout", type=float, metavar="S", default=600.0, help="seconds a request may take (default: 600)"
    )
    group.add_argument(
        "--drain", type=int, metavar="S", default=30, help="seconds to finish when stopped (default: 30)"
    )
    group.add_argument(
        "--cache-memory",
        type=float,
        metavar="GIB",
        help="for KV caches, taken at the start; 0: none (default: 1, on a GPU half of what is free)",
    )
    group.add_argument("--max-length", type=int, metavar="N", default=4096, help="tokens of a sequence (default: 4096)")
    group.add_argument(
        "--max-body", type=int, metavar="BYTES", default=1_000_000, help="of a request (default: 1000000)"
    )
    group.add_argument(
        "--max-text",
        type=int,
        metavar="BYTES",
        help="of a text or conversation; never more than can fit (default: 16 for each token that fits)",
    )
    group.add_argument("--connections", type=int, metavar="N", default=256, help="sockets that are held (default: 256)")
    group.add_argument(
        "--io-timeout",
        type=float,
        metavar="S",
        default=30.0,
        help="seconds in which a client must send its headers, then its body, and read what it is sent (default: 30)",
    )
    group.add_argument("--api-key-file", metavar="PATH", help=f"clients must know the key in this file (or in ${KEY})")
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name by which clients may call the server, beside its addresses; *.NAME or * for any",
    )
    group.add_argument(
        "--cors", metavar="ORIGIN", action="append", default=[], help="a site whose pages may call the server"
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="answers that do not depend on who else asks, to the bit, on a GPU too, whose network then sees one "
        "sequence at a time (on a CPU that is so anyway)",
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
        from codd.serving.engine import Engine
    except ImportError as error:
        raise MissingDependency(f"codd serve needs {error.name}: pip install 'codd[serve]'.") from None
    settings = _settings(args)
    with server.listen(args.host, args.port) as wire:
        model = sampling.model_from(args)
        if model.mask_id is None:
            raise InvalidInput("this checkpoint does not say which token is the mask, so that nothing can be filled.")
        _log(quiet=args.quiet)
        engine = Engine(
            model,
            slots=args.slots,
            queue=args.queue,
            exact=args.exact,
            cache_memory=None if args.cache_memory is None else int(args.cache_memory * 2**30),
            cache_length=args.max_length,
        )
        default = settings.limits.defaults.cache
        if default is not None and not engine.load.cache_slots:
            raise InvalidInput(
                f"--cache {default}: no KV cache of {args.max_length} positions fits into --cache-memory: "
                "give more, a lower --max-length, or no --cache."
            )
        found = server.create_server(
            engine, settings, drain=args.drain, on_ready=lambda url: _tell(url, settings.name, args.json)
        )
        found.run(sockets=[wire])
    return 0 if found.started else 1


def _tell(url: str, name: str, as_json: bool) -> None:
    print(json.dumps({"url": url, "model": name}) if as_json else f"{name} is served at {url}", flush=True)


def _log(quiet: bool) -> None:
    """To stderr; of other libraries only what goes wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("codd.serving").setLevel(logging.WARNING if quiet else logging.INFO)


def _check(args: argparse.Namespace) -> None:
    least = {
        "connections": 1,
        "slots": 1,
        "queue": 0,
        "drain": 0,
        "max_length": 1,
        "max_body": 1,
        "max_text": 1,
        "port": 0,
    }
    for name, value in least.items():
        if getattr(args, name) is not None and getattr(args, name) < value:
            raise InvalidInput(f"--{name.replace('_', '-')} must be at least {value}, found {getattr(args, name)}.")
    if args.port > 65535:
        raise InvalidInput(f"--port must be at most 65535, found {args.port}.")
    for name in ("timeout", "io_timeout"):
        if not getattr(args, name) > 0:
            option = name.replace("_", "-")
            raise InvalidInput(f"--{option} must be more than 0 seconds, found {getattr(args, name)}.")
    if args.cache_memory is not None and not 0 <= args.cache_memory < math.inf:
        raise InvalidInput(f"--cache-memory must be a number of GiB, 0 or more, found {args.cache_memory}.")


def _settings(args: argparse.Namespace) -> "Settings":
    from codd.serving.app import Settings
    from codd.serving.middleware import Security
    from codd.serving.prompts import Limits

    key = _key(args)
    if key is None and args.host not in LOCAL:
        console.err().print(
            f"codd: anybody who can reach {args.host} can use this server: set {KEY} to ask for a key.", style="yellow"
        )
    return Settings(
        name=args.name or _name(args),
        about=sampling.about(args),
        # More than can ever wait would be told to come again for ever.
        limits=Limits(
            sampling.options_from(args),
            args.max_length,
            min(Limits.sequences, args.slots + args.queue),
            args.max_text,
        ),
        security=Security(args.host, tuple(args.allow_host), key, args.max_body, tuple(args.cors)),
        timeout=args.timeout,
        log_text=args.log_text,
        connections=args.connections,
        io_timeout=args.io_timeout,
    )


def _name(args: argparse.Namespace) -> str:
    return "codd-mini" if args.model is None else Path(args.model).name or str(args.model)


def _key(args: argparse.Namespace) -> str | None:
    """From a file or the environment, where no list of processes shows it."""
    if args.api_key_file is None:
        return os.environ.get(KEY) or None
    key = Path(args.api_key_file).read_text(encoding="utf-8").strip()
    if not key:
        raise InvalidInput(f"{args.api_key_file}: there is no key in it.")
    return key
