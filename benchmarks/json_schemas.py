r"""How many JSON schemas from the wild are compiled, and how exactly: codd, and engines that are installed beside it.

    python benchmarks/json_schemas.py public.jsonl.xz [--engines codd llguidance xgrammar outlines] [--every 4]

Each line of the file is a schema with ``group``, ``name``, ``schema`` and ``tests``: instances (``data``) and whether
they are ``valid``. Printed are the schemas that compile, those of which all instances are told right, invalid instances
that are accepted, valid ones that are refused, crashes, and milliseconds to compile. Engines other than codd need their
packages (``llguidance``, ``xgrammar``, ``outlines_core``) and are given the tokens of the bundled model.

``--cost N`` prints instead what a step takes under N of the schemas, drawn at random, over one without (CPU time of one
thread, one after the other): 64 tokens, the bundled model and its defaults.
"""

import argparse
import json
import lzma
import random
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch

import codd
from codd.backbones import Tokenizer
from codd.backbones.loading import BUNDLED
from codd.constraints import JsonSchema, Vocabulary
from codd.errors import CoddError

Accepts = Callable[[str], bool]
Compile = Callable[[Any], Accepts]
"""From a schema to a function that says whether a text is allowed; an exception where it is not supported."""


class Result(NamedTuple):
    """What an engine did with one schema."""

    name: str
    seconds: float
    error: str
    """Empty if it was compiled."""
    crashed: bool
    refused: int
    """Valid instances that were refused."""
    accepted: int
    """Invalid instances that were accepted."""
    states: int


class _TooSlow(Exception):
    """The time limit of one schema has passed."""


def codd_engine(tokenizer: Tokenizer, additional: bool) -> Compile:
    """Ours; instances are tokens of the bundled model."""
    vocabulary = Vocabulary.of(tokenizer)

    def compile(schema: Any) -> Accepts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            language = JsonSchema(schema, additional=additional)
        automaton = language._compile(vocabulary, 1 << 14)  # without the caches

        def accepts(text: str) -> bool:
            return automaton.accepts(tokenizer.encode(text))

        accepts.states = automaton.num_states  # type: ignore[attr-defined]
        return accepts

    return compile


def llguidance_engine(tokenizer: Tokenizer) -> Compile:
    """The engine of guidance."""
    import llguidance  # type: ignore[import-not-found]
    from llguidance import LLMatcher, LLTokenizer

    tokens = list(Vocabulary.of(tokenizer).tokens)
    native = LLTokenizer(llguidance.TokenizerWrapper(_Tokens(tokens, tokenizer)))

    def compile(schema: Any) -> Accepts:
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
        matcher = LLMatcher(native, grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        def accepts(text: str) -> bool:
            fresh, ids = matcher.deep_copy(), tokenizer.encode(text)
            return bool(fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting())

        return accepts

    return compile


class _Tokens:
    """The bundled tokenizer as llguidance asks for it."""

    def __init__(self, tokens: list[bytes], tokenizer: Tokenizer):
        self.tokens = [token or b"\xff<special>" for token in tokens]
        self.special_token_ids = [i for i, token in enumerate(tokens) if not token]
        self.eos_token_id = self.special_token_ids[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def xgrammar_engine(tokenizer: Tokenizer) -> Compile:
    """The engine of MLC."""
    import xgrammar  # type: ignore[import-not-found]

    tokens = list(Vocabulary.of(tokenizer).tokens)
    stop = next(i for i, token in enumerate(tokens) if not token)
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[stop])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def compile(schema: Any) -> Accepts:
        grammar = compiler.compile_json_schema(json.dumps(schema))

        def accepts(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(grammar)
            return all(map(matcher.accept_token, tokenizer.encode(text))) and matcher.accept_token(stop)

        return accepts

    return compile


def outlines_engine(tokenizer: Tokenizer) -> Compile:
    """outlines-core: its index is timed, and texts are matched with the expression that it makes of a schema."""
    import re

    from outlines_core import Index  # type: ignore[import-not-found]
    from outlines_core import Vocabulary as Ids
    from outlines_core.json_schema import build_regex_from_schema  # type: ignore[import-not-found]

    tokens = Vocabulary.of(tokenizer).tokens
    stop = next(i for i, token in enumerate(tokens) if not token)
    ids = Ids(stop, {token: [i] for i, token in enumerate(tokens) if token})

    def compile(schema: Any) -> Accepts:
        pattern = build_regex_from_schema(json.dumps(schema))
        Index(pattern, ids)
        return lambda text: re.fullmatch(pattern, text) is not None

    return compile


ENGINES: dict[str, Callable[[Tokenizer], Compile]] = {
    "codd": lambda tokenizer: codd_engine(tokenizer, additional=False),
    "codd, additional": lambda tokenizer: codd_engine(tokenizer, additional=True),
    "llguidance": llguidance_engine,
    "xgrammar": xgrammar_engine,
    "outlines": outlines_engine,
}


def run(compile: Compile, row: dict[str, Any], limit: float) -> Result:
    """One schema with its instances, within a limit of seconds."""

    def stop(*_: object) -> None:
        raise _TooSlow(f"more than {limit:g} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    begun, refused, accepted, seconds = time.process_time(), 0, 0, 0.0
    try:
        accepts = compile(row["schema"])
        seconds = time.process_time() - begun
        for test in row["tests"]:
            right = accepts(json.dumps(in_order(test["data"], [row["schema"]], row["schema"]), ensure_ascii=False))
            refused += test["valid"] and not right
            accepted += not test["valid"] and right
    except Exception as error:
        crashed = not isinstance(error, CoddError | ValueError | _TooSlow)
        message = f"{type(error).__name__}: {error}"
        return Result(row["name"], time.process_time() - begun, message, crashed, 0, 0, 0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Result(row["name"], seconds, "", False, refused, accepted, getattr(accepts, "states", 0))


def in_order(value: Any, schemas: list[Any], root: Any) -> Any:
    """An instance with its properties in the order in which the schemas that speak of it name them."""
    said = [part for schema in schemas for part in _spoken(schema, root, 0)]
    if isinstance(value, list):
        items = [part["items"] for part in said if isinstance(part.get("items"), dict)]
        leading = [part.get("prefixItems") or part.get("items") for part in said]
        lists = [listed for listed in leading if isinstance(listed, list)]
        return [in_order(v, [*items, *(part[i] for part in lists if i < len(part))], root) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    named: dict[str, list[Any]] = {}
    for part in said:
        for name, inner in (part.get("properties") or {}).items():
            named.setdefault(name, []).append(inner)
        for name in part["required"] if isinstance(part.get("required"), list) else ():
            named.setdefault(name, [])
    others = [part["additionalProperties"] for part in said if isinstance(part.get("additionalProperties"), dict)]
    others += [inner for part in said for inner in (part.get("patternProperties") or {}).values()]
    names = [*(name for name in named if name in value), *(name for name in value if name not in named)]
    return {name: in_order(value[name], named.get(name) or others, root) for name in names}


def _spoken(schema: Any, root: Any, depth: int) -> Iterator[dict[str, Any]]:
    """A schema and those that speak of the same value, in order."""
    if not isinstance(schema, dict) or depth > 20:
        return
    yield schema
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        target = root
        for step in unquote(schema["$ref"]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step, {}) if isinstance(target, dict) else {}
        yield from _spoken(target, root, depth + 1)
    for word in ("allOf", "anyOf", "oneOf"):
        for branch in schema.get(word) or ():
            yield from _spoken(branch, root, depth + 1)
    for word in ("if", "then", "else"):
        yield from _spoken(schema.get(word), root, depth + 1)
    for word in ("dependencies", "dependentSchemas"):
        for branch in (schema.get(word) or {}).values():
            yield from _spoken(branch, root, depth + 1)


def read(path: Path, every: int) -> Iterator[dict[str, Any]]:
    """The lines of the file, or every n-th of them."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
        for i, line in enumerate(lines):
            if i % every == 0:
                yield json.loads(line)


def summary(engine: str, results: list[Result]) -> str:
    """A row of the table."""
    done = [result for result in results if not result.error]
    right = sum(not result.refused and not result.accepted for result in done)
    times = sorted(1e3 * result.seconds for result in done) or [float("nan")]
    return (
        f"| {engine} | {len(done)} ({len(done) / len(results):.1%}) | {right} ({right / len(results):.1%}) | "
        f"{sum(result.accepted > 0 for result in done)} | {sum(result.refused > 0 for result in done)} | "
        f"{sum(result.crashed for result in results)} | {statistics.median(times):.1f} | "
        f"{times[int(0.9 * (len(times) - 1))]:.0f} |"
    )


def cost(rows: list[dict[str, Any]], count: int) -> None:
    """Print what a call takes under some of the schemas, over one without."""
    torch.set_num_threads(1)
    model, room = codd.load(), 64
    ratios: list[float] = []
    question = (
        "A store sells 26 scarves on Thursday. On Friday it sells 284 more scarves than on Thursday. "
        "How many scarves are sold in all?"
    )
    random.Random(0).shuffle(rows)

    def seconds(language: JsonSchema | None) -> float:
        begun = time.process_time()
        steps = model.generate(question, gen_length=room, constraint=language, seed=1).steps
        return (time.process_time() - begun) / steps[0]

    print("| states | call under it, ms | call without, ms | ratio |\n|---|---|---|---|")
    for row in rows:
        if len(ratios) == count:
            break
        try:
            language = JsonSchema(row["schema"])
            automaton = model.automaton(language)
        except CoddError:
            continue
        if not bool(automaton.possible(room)[:, automaton.start].any()):
            continue
        seconds(language)  # what is kept for later calls
        under, without = seconds(language), seconds(None)
        ratios.append(under / without)
        print(f"| {automaton.num_states} | {1e3 * under:.0f} | {1e3 * without:.0f} | {ratios[-1]:.2f} |", flush=True)
    print(f"\nmedian {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")


def main() -> None:
    """Print the table, and on demand what happened to each schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["codd"])
    parser.add_argument("--every", type=int, default=1, help="every n-th schema only")
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of one schema")
    parser.add_argument("--output", type=Path, help="a JSON line for each engine and schema")
    parser.add_argument("--cost", type=int, metavar="N", help="time calls under N schemas instead")
    args = parser.parse_args()
    if args.cost is not None:
        warnings.simplefilter("ignore")
        return cost(list(read(args.file, args.every)), args.cost)
    tokenizer = Tokenizer.from_folder(BUNDLED)
    assert tokenizer is not None
    rows = list(read(args.file, args.every))
    print(f"{len(rows)} schemas, {sum(len(row['tests']) for row in rows)} instances\n")
    print("| | compiled | all right | accept invalid | refuse valid | crashed | median ms | 90% ms |")
    print("|---|---|---|---|---|---|---|---|")
    for engine in args.engines:
        compile = ENGINES[engine](tokenizer)
        results = [run(compile, row, args.seconds) for row in rows]
        print(summary(engine, results), flush=True)
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"engine": engine, **r._asdict()}) + "\n" for r in results)


if __name__ == "__main__":
    main()
