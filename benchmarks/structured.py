r"""Structured output: whether texts match, how the distribution is distorted, what it costs, whether fields are right.

    python benchmarks/structured.py --parts distortion compile --out FILE.json
    python benchmarks/structured.py --parts match --cases 0:50 --out A.json
    python benchmarks/structured.py --parts match --cases 50:300 --add A.json --out B.json      # the sum of both
    python benchmarks/structured.py --parts cost --device cuda --shape llada --out FILE.json
    python benchmarks/structured.py --tiny                                                      # toy sizes

match: regular expressions and JSON schemas from a seed, written by the bundled model with every sampler; each text is
checked with ``re`` or jsonschema_rs, and a step that commits nothing, or one more than there are masks, is a stall.
distortion: total variation to the exact conditional, which enumeration gives, of samples made in several ways. cost:
milliseconds (of the process on a CPU) of a step's sampler, given the logits, by the number of the automaton's states.
compile: seconds to compile the cases, nothing cached, for the bundled vocabulary and a made one of LLaDA's size.
quality: word problems of two steps (--seed, the test split) read into records of nine fields by the bundled model, with
and without constraint and circuit, --calls per text. A part raises if its answers are wrong.
"""

import argparse
import json
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import numpy as np
import torch
from torch import Tensor

import codd
from codd.circuits import HMM, Evidence
from codd.circuits.constrained import WindowConstraint
from codd.constraints import Automaton, Choice, JsonSchema, Language, Regex, Vocabulary
from codd.constraints import cache as compiled
from codd.coupling import Coupled
from codd.decoding import Options
from codd.decoding.cuda_graphs import sample_captured
from codd.decoding.samplers import Noise, WindowInputs, sample_window
from codd.errors import InvalidConstraint
from codd.evaluation.statistics import paired, share_interval
from codd_lab.problems import problems
from decoding import SAMPLERS
from families import run_parts
from structured_cases import made_vocabulary, random_regex, random_schema
from timing import milliseconds

WINDOW = 32
FLOORS = 20
"""Sets of exact draws, of whose total variation to the truth the mean is the noise to expect."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--regexes", type=int, default=200)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--cases", default=":", metavar="A:B", help="of match: regexes first, then schemas")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], help="reports whose matches of other cases count, too"
    )
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draws", type=int, default=20000, help="of distortion, in each way (default: 20000)")
    parser.add_argument("--languages", nargs="+", choices=LANGUAGES, default=list(LANGUAGES), help="of distortion")
    parser.add_argument("--states", type=int, nargs="+", default=[8, 64, 512], help="of cost, about")
    parser.add_argument("--shape", choices=("mini", "llada"), default="mini", help="of cost")
    parser.add_argument("--logits", nargs="+", choices=("float32", "bfloat16"), default=["float32"], help="of cost")
    parser.add_argument("--tokens", type=int, default=8, help="that a step commits, of cost (default: 8)")
    parser.add_argument("--rounds", type=int, default=10, help="of cost (default: 10)")
    parser.add_argument("--vocab", type=int, default=126464, help="made tokens (default: LLaDA's 126464)")
    parser.add_argument("--circuit-states", type=int, default=1024, help="of llada's shape (default: 1024)")
    parser.add_argument("--problems", type=int, default=160, help="of quality (default: 160)")
    parser.add_argument("--calls", type=int, default=8, help="of quality, a text; 0: the default pace (default: 8)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="of cost (default: cpu)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all figures as JSON, after every part")
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: needs a CUDA device, and PyTorch finds none; for a tiny run: --tiny\n")
    torch.set_num_threads(args.threads)
    if args.tiny:
        args.regexes, args.schemas, args.samplers, args.temperatures = 1, 1, ["any_order"], [1.0]
        args.draws, args.languages, args.states, args.rounds = 200, ["brackets"], [8], 1
        args.vocab, args.circuit_states, args.problems, args.tokens, args.calls = 2000, 4, 1, 1, 2
    parser.exit(0 if run_parts(args, args.parts, PARTS) else 1)


@cache
def bundled() -> codd.Model:
    return codd.load(device="cpu")


class Case(NamedTuple):
    """A language, and what tells whether a text is in it without us."""

    language: Language
    matches: Callable[[str], bool]


def cases(args: argparse.Namespace) -> list[Case]:
    rng = random.Random(args.seed)
    found = []
    for _ in range(args.regexes):
        pattern, _ = random_regex(rng)
        found.append(Case(Regex(pattern), partial(in_regex, pattern)))
    for _ in range(args.schemas):
        schema = random_schema(rng)
        found.append(Case(JsonSchema(schema), partial(in_schema, schema)))
    return found


def in_regex(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def in_schema(schema: Any, text: str) -> bool:
    try:
        return bool(jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text)))
    except ValueError:
        return False


def match(args: argparse.Namespace) -> dict[str, Any]:
    """Sums by sampler and temperature; AssertionError with all of them, and what failed, if a text does not match."""
    model, failures = bundled(), list[str]()
    sums = {way: Counter[str]() for way in product(args.samplers, args.temperatures)}
    begin, end = (int(bound) if bound else None for bound in args.cases.split(":"))
    prompts = [problem.question for problem in problems(args.regexes + args.schemas, split="test", seed=args.seed)]
    for number, (case, prompt) in list(enumerate(zip(cases(args), prompts, strict=True)))[begin:end]:
        prompt_ids = model.encode(prompt)[0]
        length = room(model.automaton(case.language))
        for (sampler, temperature), row in sums.items():
            told: dict[str, Any] = {"gen_length": length, "sampler": sampler, "temperature": temperature}
            begun = time.process_time()
            try:
                steps = list(model.denoise(prompt, constraint=case.language, seed=args.seed, **told))
                text = model.text(steps[-1].ids, prompt_ids)
                stalled = len(steps) > length or any(not len(step.positions) for step in steps)
                row += Counter(matched=case.matches(text), stalls=stalled, calls=len(steps), tokens=length)
                if stalled or not case.matches(text):
                    failures.append(f"case {number}, {case.language!r}, {told}, prompt {prompt!r}: {text!r}")
            except Exception as error:  # what crashes is a failure like another: go on
                failures.append(f"case {number}, {case.language!r}, {told}, prompt {prompt!r}: {error!r}")
                row["crashed"] += 1
            row += Counter({"texts": 1, "cpu_seconds": time.process_time() - begun})
            sums[sampler, temperature] = row
        done = {f"{sampler}, T {temperature:g}": dict(row) for (sampler, temperature), row in sums.items()}
        print(f"match, case {number}: {json.dumps(done)}", flush=True)
    found: dict[str, Any] = {f"{sampler}, T {temperature:g}": row for (sampler, temperature), row in sums.items()}
    for path in args.add:
        for way, row in json.loads(path.read_text())["match"].items():
            found[way] = found.get(way, Counter()) + Counter(row)
    assert not failures, json.dumps({"sums": found, "failures": failures}, ensure_ascii=False)
    return found


def room(automaton: Automaton) -> int:
    """Tokens for a text of a language: whole blocks, a quarter more than the shortest needs."""
    most = WINDOW
    while not bool((fits := automaton.possible(most)[:, automaton.start]).any()):
        most *= 2
    return WINDOW * -(-int(1.25 * int(fits.nonzero()[0])) // WINDOW) or WINDOW


class Setting(NamedTuple):
    """A window of a text, and a language of thousands of token strings for it."""

    prompt: str
    before: str
    window: str
    """Some text of the language: the tokens of it that ``masked`` matches are masked, the others are seen."""
    masked: str
    after: str
    language: Language


_STAMPS = "Mia has 84 stamps. She buys 12 more. How many stamps does Mia have now?"
_BOWLS = "For a feast, Kate makes 5 bowls of rice with 32 ounces in each bowl. How many ounces is that in all?"
LANGUAGES: dict[str, Setting] = {
    "sums": Setting(
        _STAMPS,
        "Now Mia has",
        " 84 + 12 = 96",
        r"\d",
        " stamps.\n",
        Choice([f" {a} + {b} = {a + b}" for a in range(10, 90) for b in range(10, 100 - a)]),
    ),
    "products": Setting(
        _BOWLS,
        "That is",
        " 5 * 32 = 160",
        r"\d",
        " ounces.\n",
        Choice([f" {a} * {b} = {a * b}" for a in range(2, 10) for b in range(10, 100) if 100 <= a * b < 1000]),
    ),
    "facts": Setting(
        _STAMPS,
        "Now",
        " Mia has 96 stamps",
        r".",
        ".\n",
        Regex(r" (Mia|Tom|Kate|Oscar|Luis) (has|buys|sells|keeps) [1-9]\d (stamps|coins|books|cards|hats)"),
    ),
    "brackets": Setting(
        _STAMPS,
        "Now Mia has 84 + 12 =",
        " (96)",
        r".",
        " stamps.\n",
        Regex(r" (\(\d\d\)|\[\d\d\]|\"\d\d\"|\*\d\d\*|\d\d\d\d|\$\d\d\.)"),
    ),
}
_OPEN = {
    "sums": "Mia has some stamps. She buys some more. How many stamps does Mia have now?",
    "products": "For a feast, Kate makes some bowls of rice. How many ounces is that in all?",
    "facts": "Some children meet at the market. Who has the most?",
}
LANGUAGES |= {f"open {name}": LANGUAGES[name]._replace(prompt=prompt) for name, prompt in _OPEN.items()}
"""The questions of the first four say the numbers, so that the network is sure of one string; the open ones do not."""


def distortion(args: argparse.Namespace) -> dict[str, Any]:
    return {name: distorted(LANGUAGES[name], args) for name in args.languages}


def distorted(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """By way of sampling: the share of valid texts, and of these the total variation to both truths."""
    model, draw = bundled(), torch.Generator().manual_seed(args.seed)
    automaton = setting.language.compile(model.vocabulary, max_states=2**17)  # a choice of thousands of texts
    coupled, tokens, masked, logits = couplings(setting)
    words, states, ways = accepted(automaton, tokens, masked)
    joint = coupled(model.circuit)
    log_p = logits.double().log_softmax(-1)
    places = masked.nonzero()[:, 0]
    network = log_p[places, words[:, places]].sum(-1)
    wide = wide_circuit(model)
    both = network + circuit_log_weights(coupled(wide), words)
    given = coupled(model.circuit, constraint=automaton)
    # Exactness of log Z against enumeration, before anything is drawn.
    error = float((coupled(wide, constraint=automaton).log_partition() - both.logsumexp(0)).abs())
    assert error < 1e-6, f"log Z differs from enumeration by {error}"
    truths = {"network": network.softmax(0), "joint": both.softmax(0)}
    number = {tuple(word): i for i, word in enumerate(words.tolist())}

    def score(samples: Tensor | Sequence[Sequence[int]], draws: int = args.draws) -> dict[str, Any]:
        rows = samples.tolist() if isinstance(samples, Tensor) else samples
        hits = Counter(number[key] for row in rows if (key := tuple(row)) in number)
        return measured(hits, draws, truths)

    def drawn(p: Tensor) -> dict[str, Any]:
        return measured(Counter(p.multinomial(args.draws, True, generator=draw).tolist()), args.draws, truths)

    found: dict[str, Any] = {}
    for name, truth in truths.items():
        floors = [drawn(truth)[f"tv_{name}"] for _ in range(FLOORS)]
        found[f"exact draws, {name}"] = {f"tv_{name}": statistics.mean(floors), "highest": max(floors)}
    neutral = HMM.neutral(1, model.backbone.vocab_size)
    constrained = {"ours": given, "ours, null circuit": coupled(neutral, constraint=automaton)}
    samples = {
        name: each.sample(generator=draw, num_samples=args.draws).tokens[:, 0] for name, each in constrained.items()
    }
    found |= {name: score(each) for name, each in samples.items()}
    for name in samples:
        assert found[name]["valid"] == 1, f"{name}: samples outside of the language"
    apart = tokens.repeat(args.draws, 1)
    for place in places.tolist():
        allowed = torch.unique(words[:, place])
        picked = log_p[place, allowed].softmax(0).multinomial(args.draws, True, generator=draw)
        apart[:, place] = allowed[picked]
    found["position-wise, valid kept"] = score(apart)
    found["position-wise, repaired"] = score(repaired(apart, words, network))
    found["left to right"] = drawn(q := left_to_right(log_p, words, states, ways, places))
    found["left to right"] |= {f"exact_tv_{name}": variation(q, truth) for name, truth in truths.items()}
    free = joint.sample(generator=draw, num_samples=args.draws).tokens[:, 0]
    acceptance = float((given.log_partition() - joint.log_partition()).exp())
    found["rejection"] = score(free) | {"acceptance": acceptance, "draws_a_text": 1 / acceptance}
    size = {"strings": len(words), "masked": len(places), "states": automaton.num_states, "error_of_log_z": error}
    size |= {f"entropy_{name}": float(torch.special.entr(truth).sum()) for name, truth in truths.items()}
    between = variation(truths["network"], truths["joint"])
    for name, row in found.items():
        print(f"{setting.window!r}, {name}: {json.dumps(row)}", flush=True)
    return {"size": size, "network_to_joint": between} | found


def wide_circuit(model: codd.Model) -> Any:
    assert model.circuit is not None
    return model.circuit.to(dtype=torch.float64)


def couplings(setting: Setting) -> tuple[Callable[..., Coupled], Tensor, Tensor, Tensor]:
    """What couples circuits to the network's logits at a window; its tokens, which are masked, and the logits."""
    model = bundled()
    spell = model.vocabulary.encode
    assert spell is not None
    window = list(spell(setting.window))
    masked = torch.tensor(
        [
            bool(re.search(setting.masked, model.tokenizer.decode([id]))) or setting.masked == "."  # type: ignore[union-attr]
            for id in window
        ]
    )
    before = [*model.encode(setting.prompt)[0], *spell(setting.before)]
    shown = [model.mask_id if hide else id for id, hide in zip(window, masked.tolist(), strict=True)]
    ids = torch.tensor([[*before, *shown, *spell(setting.after)]])
    part = slice(len(before), len(before) + len(window))
    logits, features = model.backbone(ids)[0, part], model.backbone.states(ids)[:, part]
    logits[:, [model.mask_id, *model.stop_ids]] = -torch.inf  # as decoding bans the mask; no text of ours ends here
    tokens = torch.tensor(window)

    def coupled(circuit: Any, **told: Any) -> Coupled:
        given: dict[str, Any] = {"features": features} if circuit.feature_width is not None else {}
        return Coupled(
            circuit, logits=logits.to(circuit.dtype)[None], tokens=tokens[None], masked=masked[None], **given, **told
        )

    return coupled, tokens, masked, logits


def circuit_log_weights(joint: Coupled, words: Tensor) -> Tensor:
    """The circuit's log-weights of whole strings, modulated as in ``joint``."""
    ev = joint.evidence
    more: dict[str, Any] = {
        name: None if part is None else part.expand(len(words), -1, -1)
        for name in ("latent_log_potentials", "step_log_gates")
        for part in [getattr(ev, name)]
    }
    circuit = joint.circuit.hmm if hasattr(joint.circuit, "hmm") else joint.circuit
    return circuit.log_partition(Evidence(tokens=words, **more)).double()


def accepted(automaton: Automaton, tokens: Tensor, masked: Tensor) -> tuple[Tensor, Tensor, list[dict[int, Tensor]]]:
    """All strings (K, L) that the automaton accepts and the seen tokens allow, and their states (K, L).

    Also, at each position, the tokens that lead on from each state.
    """
    alive = [automaton.accepting]
    allowed: list[dict[int, Tensor]] = []
    for token, hidden in zip(reversed(tokens.tolist()), reversed(masked.tolist()), strict=True):
        here: dict[int, Tensor] = {}
        for state in range(automaton.num_states):
            following = automaton.table[state]
            good = ((following >= 0) & alive[0][following.clamp(min=0)])[automaton.classes]
            ids = good.nonzero()[:, 0] if hidden else torch.tensor([token])[good[token : token + 1]]
            if len(ids):
                here[state] = ids
        allowed.insert(0, here)
        alive.insert(0, torch.tensor([state in here for state in range(automaton.num_states)]))
    rows: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [((), (), automaton.start)]
    for here in allowed:
        rows = [
            ((*ids, id), (*states, now), int(automaton.table[now, automaton.classes[id]]))
            for ids, states, now in rows
            for id in (here[now].tolist() if now in here else ())
        ]
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows]), allowed


def left_to_right(
    log_p: Tensor, words: Tensor, states: Tensor, ways: Sequence[dict[int, Tensor]], places: Tensor
) -> Tensor:
    """The probability of each string where each token is drawn from those with a way on, renormalised by itself."""
    log_q = torch.zeros(len(words), dtype=torch.float64)
    for place in places.tolist():
        total = torch.full((int(states.max()) + 1,), torch.inf, dtype=torch.float64)
        for state, ids in ways[place].items():
            if state < len(total):
                total[state] = log_p[place, ids].logsumexp(0)
        log_q += log_p[place, words[:, place]] - total[states[:, place]]
    q = log_q.exp()
    assert abs(float(q.sum()) - 1) < 1e-9, f"left to right: probabilities sum to {float(q.sum())}"
    return q


def repaired(samples: Tensor, words: Tensor, log_p: Tensor) -> Tensor:
    """Each sample as the string that differs from it in the fewest positions, of those the most probable one."""
    distinct, which = torch.unique(samples, dim=0, return_inverse=True)
    best = log_p.sort(descending=True).indices
    nearest = [
        best[(part[:, None] != words[best][None]).sum(-1).argmin(1)] for part in distinct.split(2**24 // words.numel())
    ]
    return words[torch.cat(nearest)[which]]


def measured(hits: Counter[int], draws: int, truths: dict[str, Tensor]) -> dict[str, Any]:
    valid = sum(hits.values())
    row: dict[str, Any] = {"valid": valid / draws, "kept": valid}
    for name, truth in truths.items():
        shares = torch.zeros_like(truth)
        for i, count in hits.items():
            shares[i] = count / valid
        row[f"tv_{name}"] = variation(shares, truth) if valid else None
    return row


def variation(p: Tensor, q: Tensor) -> float:
    """Total variation."""
    return float((p - q).abs().sum() / 2)


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the queries and samplers of a step by themselves, without a constraint and with some."""
    found: dict[str, Any] = {}
    vocabulary = bundled().vocabulary if args.shape == "mini" else made_vocabulary(args.vocab, args.seed)
    constraints: dict[str, Automaton | None] = {"none": None} | automata(args, vocabulary)
    for dtype in args.logits:
        circuit, window = inputs(args, getattr(torch, dtype))
        for name, automaton in constraints.items():
            given = None
            if automaton is not None:  # a text's first block: anything may follow it
                given = WindowConstraint(automaton, log_end=torch.zeros(automaton.num_states))
            row: dict[str, Any] = {}
            if automaton is not None:
                row |= {"states": automaton.num_states, "classes": automaton.num_classes}
            for what, function in queries(circuit, window._replace(constraint=given), args).items():
                warmup = 8 if args.device.type == "cuda" else 1  # on a GPU what is captured is captured first
                row[what] = milliseconds(function, args.rounds, args.device, warmup)
            found[f"{dtype}, {name}"] = row
            print(f"cost, {args.shape}, {dtype}, {name}: {json.dumps(row)}", flush=True)
    return found


def queries(circuit: Any, window: WindowInputs, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    captured = args.device.type == "cuda" and circuit.supports_cuda_graphs and window.constraint is None
    made: dict[str, Callable[[], object]] = {
        "log_partition": lambda: window.joint(circuit, 1.0).log_partition(),
        "marginals": lambda: window.joint(circuit, 1.0).marginals(),
    }
    for sampler, temperature in (("latent", 1.0), ("any_order", 0.0), ("any_order", 1.0)):
        options = Options.of(sampler=sampler, temperature=temperature, steps=4)

        def step(options: Options = options) -> None:
            if captured:
                packed = sample_captured(sample_window, circuit, window, args.tokens, options).cpu()
            else:
                packed = sample_window(circuit, window, args.tokens, options).packed().cpu()
            assert packed[0, -1] == 1, "a step that is void"

        made[f"{sampler}, T {temperature:g}"] = step
    return made


def inputs(args: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, WindowInputs]:
    """A circuit, and a window of masks with logits: of the bundled model, or random ones of LLaDA's size."""
    draw = torch.Generator().manual_seed(args.seed)
    features = None
    if args.shape == "mini":
        model = codd.load(device=args.device)
        circuit, begin = model.circuit, len(ids := model.encode(_STAMPS)[0])
        given = torch.tensor([[*ids, *[model.mask_id] * WINDOW]])
        logits = model.backbone(given)[0, begin:].to(dtype)
        logits[:, model.mask_id] = -torch.inf
        features = model.backbone.states(given)[0, begin:]
    else:
        gpu = torch.Generator(args.device).manual_seed(args.seed)

        def table(*shape: int) -> Tensor:
            return torch.randn(*shape, device=args.device, generator=gpu).log_softmax(-1)

        count, vocab = args.circuit_states, args.vocab
        circuit = HMM(table(count), table(count, count), table(count, vocab), window=WINDOW)
        circuit = circuit.to(emission=torch.bfloat16) if args.device.type == "cuda" else circuit
        logits = (8 * torch.randn(WINDOW, vocab, device=args.device, generator=gpu)).to(dtype)
    hidden = torch.ones(WINDOW, dtype=torch.bool)
    tokens = torch.zeros(WINDOW, dtype=torch.long)
    return circuit, WindowInputs(tokens, hidden, logits, Noise.drawn(WINDOW, draw), features)


def automata(args: argparse.Namespace, vocabulary: Vocabulary) -> dict[str, Automaton]:
    """Of about the wanted sizes: texts of at most so many letters, objects of whole numbers, and all to all."""
    found = {}
    end = len(vocabulary) - 1
    rng = np.random.default_rng(args.seed)
    for states in args.states:
        found[f"letters, {states}"] = Regex(f"[a-z ]{{0,{states - 2}}}").compile(vocabulary).with_end([end])
        found[f"object, {states}"] = nearest_object(states, vocabulary).with_end([end])
        table, classes = rng.integers(0, states, (states, 16)), rng.integers(0, 16, len(vocabulary))
        found[f"any to any, {states}"] = Automaton.from_classes(table, classes, accepting=[0])
    return found


def nearest_object(states: int, vocabulary: Vocabulary) -> Automaton:
    """Of the objects with one whole number, two, ... the one whose automaton is nearest in size."""

    def automaton(count: int) -> Automaton:
        fields = {f"n{i}": {"type": "integer"} for i in range(count)}
        return JsonSchema({"type": "object", "properties": fields, "required": list(fields)}).compile(vocabulary)

    one, two = automaton(1).num_states, automaton(2).num_states
    return automaton(max(1, 1 + round((states - 1 - one) / (two - one))))


def compile_time(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, vocabulary in (("bundled", bundled().vocabulary), ("made", made_vocabulary(args.vocab, args.seed))):
        vocabulary.characters  # noqa: B018 - made once for all languages
        vocabulary.digest  # noqa: B018
        rows: dict[str, list[tuple[float, Automaton, Language]]] = {"regexes": [], "schemas": []}
        refused = []
        with nothing_kept():
            for case in cases(args):
                compiled.forget()
                begun = time.process_time()
                try:
                    automaton = case.language.compile(vocabulary)
                except InvalidConstraint as error:
                    refused.append(f"{case.language!r}: {error}")
                    continue
                kind = "regexes" if isinstance(case.language, Regex) else "schemas"
                rows[kind].append((time.process_time() - begun, automaton, case.language))
        for kind, each in rows.items():
            seconds, sizes, classes = (
                [row[0] for row in each],
                [row[1].num_states for row in each],
                [row[1].num_classes for row in each],
            )
            worst = max(each, key=lambda row: row[0])
            found[f"{name} ({len(vocabulary)} tokens), {kind}"] = {
                "languages": len(each),
                "median_s": statistics.median(seconds),
                "p95_s": float(np.percentile(seconds, 95)),
                "worst_s": worst[0],
                "worst": f"{worst[2]!r}"[:200],
                "states": [statistics.median(sizes), max(sizes)],
                "classes": [statistics.median(classes), max(classes)],
            }
        found[f"{name}, refused"] = refused
    assert not any(found[f"{name}, refused"] for name in ("bundled", "made")), json.dumps(found)
    return found


@contextmanager
def nothing_kept() -> Iterator[None]:
    """No file is read from the cache of automata or written to it: its folder is none."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = os.devnull
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


NUMBER = "(0|[1-9][0-9]{0,3})"
RECORD = rf"([^0-9\n]+ {NUMBER} [-+*/] {NUMBER} = {NUMBER}[^0-9\n]+\n){{2}}#### {NUMBER}"
"""Two steps and an answer, as the bundled model writes them; it has never seen JSON."""


def quality(args: argparse.Namespace) -> dict[str, Any]:
    """Word problems of two steps read into records; problem by problem, of every way the fields that are right."""
    model, language, pace = bundled(), Regex(RECORD), {"steps": args.calls} if args.calls else {}
    null = model.with_circuit("null")
    ways = {
        "constrained, circuit": (model, language),
        "constrained, null circuit": (null, language),
        "unconstrained, circuit": (model, None),
        "unconstrained, null circuit": (null, None),
    }
    every = problems(100 * args.problems, split="test", seed=args.seed)
    chosen = islice((each for each in every if re.fullmatch(RECORD, each.solution)), args.problems)
    found: dict[str, list[Counter[str]]] = {way: [] for way in ways}
    for number, problem in enumerate(chosen):
        truth = fields(problem.solution)
        for way, (each, constraint) in ways.items():
            begun = time.process_time()
            written = each.generate(problem.question, gen_length=64, constraint=constraint, seed=args.seed, **pace)
            seconds = time.process_time() - begun
            [text] = written.texts or [""]
            hits = [value == true for value, true in zip(fields(text), truth, strict=True)]
            row = Counter(fields=sum(hits), record=all(hits), answer=hits[-1], calls=written.steps[0])
            row["valid"], row["cpu_seconds"] = re.fullmatch(RECORD, text) is not None, seconds  # type: ignore[assignment]
            assert row["valid"] or constraint is None, f"{problem.question!r}: {text!r} is not in the language"
            found[way].append(row)
            print(f"quality {number}, {way}: {text!r}, right fields {row['fields']} of {len(truth)}", flush=True)
    report: dict[str, Any] = {"problems": args.problems, "calls": args.calls or "default", "fields": len(truth)}
    for way, rows in found.items():
        sums = {name: sum(row[name] for row in rows) for name in ("fields", "record", "answer", "valid", "calls")}
        intervals = {name: share_interval(sums[name], len(rows)) for name in ("record", "answer", "valid")}
        report[way] = sums | {"intervals": intervals, "cpu_seconds": sum(row["cpu_seconds"] for row in rows)}
    first, *others = found
    for way in others:
        for name, most in (("fields", len(truth)), ("record", 1), ("answer", 1)):
            mine, theirs = ([row[name] / most for row in found[each]] for each in (first, way))
            report[f"{name}: {first} less {way}"] = str(paired(mine, theirs, args.seed))
    return report


def fields(text: str) -> list[str]:
    """The numbers and signs of the first two equations and the answer, wherever they stand; "" for what is missing."""
    equations = [*re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text), ("",) * 4, ("",) * 4][:2]
    answer = re.search(r"#### (\d+)", text)
    return [*equations[0], *equations[1], answer[1] if answer else ""]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "match": match,
    "distortion": distortion,
    "cost": cost,
    "compile": compile_time,
    "quality": quality,
}

if __name__ == "__main__":
    main()
