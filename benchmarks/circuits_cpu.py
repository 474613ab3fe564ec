"""Every query of an HMM on the CPU, side by side with plain PyTorch and other libraries where they are installed.

Everyone gets the same parameters and the same inputs, in the form that the library likes best, prepared outside the
clock. Every answer is compared with ours before anything is timed. Other libraries are imported only when they take
part.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from codd.circuits import inference
from codd.circuits.evidence import Evidence, SparsePotentials
from codd.circuits.hmm import HMM
from codd_lab.provenance import provenance
from timing import Spread, Timing, interleaved, save

TOLERANCE = 1e-3
"""How far an answer may be from ours, relative to the largest entry."""
OURS = "codd"
QUERIES = {
    "smoother": "smoother: p(z_t | evidence) from given state likelihoods",
    "smoother_tokens": "smoother: p(z_t | tokens) from observed tokens",
    "sample_latents": "posterior sample of the latent path from given state likelihoods",
    "log_prob": "log-likelihood of observed tokens",
    "log_partition": "log Z with soft evidence (logits over all tokens)",
    "log_partition_sample": "log Z, then a joint sample of latents and tokens, with soft evidence",
}


@dataclass(frozen=True)
class Settings:
    """The sizes, and how to measure. ``threads`` of None means all cores; of one, processor time is measured."""

    states: int = 256
    tokens: int = 8192
    length: int = 32
    batch: int = 8
    threads: int | None = None
    rounds: int = 30
    burst: int = 5
    seed: int = 0
    kept: int = 64
    sharpness: float = 4.0
    """Logits are this times normal numbers; with 4 and 8192 tokens the top 64 hold nine tenths of the mass."""


@dataclass(frozen=True)
class Problem:
    """One HMM and the evidence that everyone is asked about."""

    hmm: HMM
    ids: Int[Tensor, "B L"]
    log_likelihoods: Float[Tensor, "B L N"]
    logits: Float[Tensor, "B L V"]
    kept: int
    seed: int

    @classmethod
    def of(cls, settings: Settings) -> "Problem":
        """Draw parameters, strings from the model, and logits."""
        hmm = HMM.random(settings.states, settings.tokens, settings.seed)
        generator = torch.Generator().manual_seed(settings.seed + 1)
        nothing = Evidence(missing=torch.ones(settings.batch, settings.length, dtype=torch.bool))
        ids = hmm.sample(nothing, generator=generator).tokens
        logits = torch.randn(settings.batch, settings.length, settings.tokens, generator=generator) * settings.sharpness
        kept = min(settings.kept, settings.tokens)
        return cls(hmm, ids, hmm.log_emission.T.contiguous()[ids], logits, kept, settings.seed)

    @property
    def probabilities(self) -> tuple[Float[Tensor, " N"], Float[Tensor, "N N"], Float[Tensor, "N V"]]:
        """Initial distribution, transition and emission."""
        assert isinstance(self.hmm.log_transition, Tensor)
        return self.hmm.log_initial.exp(), self.hmm.log_transition.exp(), self.hmm.log_emission.exp()


@dataclass(frozen=True)
class Contender:
    """A call to time, and what turns its result into a tensor that can be compared with ours.

    Posteriors are compared as probabilities and log-likelihoods as their sum over the batch, as this is what all the
    libraries can give. ``exact`` is False where a difference is expected: it is then reported, not judged.
    """

    call: Callable[[], Any]
    answer: Callable[[Any], Tensor]
    exact: bool = True


def ours(problem: Problem) -> dict[str, Contender]:
    """This library: from tensors to results, the construction of the evidence included."""
    hmm, ids, logits = problem.hmm, problem.ids, problem.logits
    generator = torch.Generator().manual_seed(problem.seed)

    def given() -> Evidence:
        return Evidence(latent_log_potentials=problem.log_likelihoods)

    def path(ev: Evidence) -> Tensor:
        uniforms = torch.rand(ev.shape[0], 1, ev.shape[1], generator=generator)
        return inference.sample_latents(hmm, hmm.centred(ev)[0], uniforms)[0][:, 0]

    def both(ev: Evidence) -> Tensor:
        hmm.log_partition(ev)
        return hmm.sample(ev, generator=generator).tokens

    return {
        "smoother": Contender(lambda: hmm.posterior(given()), torch.exp),
        "smoother_tokens": Contender(lambda: hmm.posterior(Evidence(tokens=ids)), torch.exp),
        "sample_latents": Contender(lambda: path(given()), _same),
        "log_prob": Contender(lambda: hmm.log_prob(ids), torch.sum),
        "log_partition": Contender(lambda: hmm.log_partition(Evidence(logits=logits)), _same),
        "log_partition_sample": Contender(lambda: both(Evidence(logits=logits)), _same),
    }


def ours_sparse(problem: Problem, *, selecting: bool) -> dict[str, Contender]:
    """This library with top-k evidence, at hand or selected from the logits within the time."""
    hmm = problem.hmm
    generator = torch.Generator().manual_seed(problem.seed)
    at_hand = SparsePotentials.from_logits(problem.logits, problem.kept)

    def evidence() -> Evidence:
        chosen = SparsePotentials.from_logits(problem.logits, problem.kept) if selecting else at_hand
        return Evidence(sparse=chosen)

    def both() -> Tensor:
        ev = evidence()
        hmm.log_partition(ev)
        return hmm.sample(ev, generator=generator).tokens

    return {
        "log_partition": Contender(lambda: hmm.log_partition(evidence()), _same, exact=False),
        "log_partition_sample": Contender(both, _same),
    }


# Plain PyTorch: what one would write without a library. Probabilities, with each message normalised.


def plain_leaf(emission: Float[Tensor, "N V"], logits: Float[Tensor, "B L V"]) -> Float[Tensor, "B L N"]:
    """sum_v E[i, v] softmax(logits)[v]."""
    return logits.log_softmax(-1).exp() @ emission.T


def plain_filter(
    initial: Float[Tensor, " N"], transition: Float[Tensor, "N N"], leaf: Float[Tensor, "B L N"]
) -> tuple[Float[Tensor, "B L N"], Float[Tensor, " B"]]:
    """p(z_t | evidence up to t), and log Z."""
    predicted, rows, norms = initial.expand(len(leaf), -1), [], []
    for t in range(leaf.shape[1]):
        joint = predicted * leaf[:, t]
        norms.append(joint.sum(-1))
        rows.append(joint / norms[-1][:, None])
        predicted = rows[-1] @ transition
    return torch.stack(rows, 1), torch.stack(norms, 1).log().sum(-1)


def plain_smoother(
    initial: Float[Tensor, " N"], transition: Float[Tensor, "N N"], leaf: Float[Tensor, "B L N"]
) -> Float[Tensor, "B L N"]:
    """p(z_t | evidence)."""
    filtered, _ = plain_filter(initial, transition, leaf)
    backward, rows = torch.ones_like(leaf[:, 0]), []
    for t in reversed(range(leaf.shape[1])):
        joint = filtered[:, t] * backward
        rows.append(joint / joint.sum(-1, keepdim=True))
        backward = (backward * leaf[:, t]) @ transition.T
        backward = backward / backward.sum(-1, keepdim=True)
    return torch.stack(rows[::-1], 1)


def plain_path(
    initial: Float[Tensor, " N"],
    transition: Float[Tensor, "N N"],
    leaf: Float[Tensor, "B L N"],
    generator: torch.Generator,
) -> Int[Tensor, "B L"]:
    """A latent path from its posterior: forward filtering, backward sampling."""
    filtered, _ = plain_filter(initial, transition, leaf)
    weights, path, into = filtered[:, -1], [], transition.T.contiguous()
    for t in reversed(range(leaf.shape[1])):
        path.append(torch.multinomial(weights, 1, generator=generator)[:, 0])
        weights = filtered[:, t - 1] * into[path[-1]]
    return torch.stack(path[::-1], 1)


def plain_sample(
    initial: Float[Tensor, " N"],
    transition: Float[Tensor, "N N"],
    emission: Float[Tensor, "N V"],
    logits: Float[Tensor, "B L V"],
    generator: torch.Generator,
) -> Int[Tensor, "B L"]:
    """Tokens from circuit times softmax(logits)."""
    path = plain_path(initial, transition, plain_leaf(emission, logits), generator)
    weights = logits.softmax(-1) * emission[path]
    return torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(path.shape)


def plain(problem: Problem) -> dict[str, Contender]:
    """The functions above."""
    chain, emission = problem.probabilities[:2], problem.probabilities[2]
    columns, ids, logits = emission.T.contiguous(), problem.ids, problem.logits
    generator = torch.Generator().manual_seed(problem.seed)

    def leaf() -> Tensor:
        return (problem.log_likelihoods - problem.log_likelihoods.amax(-1, keepdim=True)).exp()

    def both() -> Tensor:
        plain_filter(*chain, plain_leaf(emission, logits))
        return plain_sample(*chain, emission, logits, generator)

    return {
        "smoother": Contender(lambda: plain_smoother(*chain, leaf()), _same),
        "smoother_tokens": Contender(lambda: plain_smoother(*chain, columns[ids]), _same),
        "sample_latents": Contender(lambda: plain_path(*chain, leaf(), generator), _same),
        "log_prob": Contender(lambda: plain_filter(*chain, columns[ids])[1], torch.sum),
        "log_partition": Contender(lambda: plain_filter(*chain, plain_leaf(emission, logits))[1], _same),
        "log_partition_sample": Contender(both, _same),
    }


# Other libraries.


def dynamax(problem: Problem) -> dict[str, Contender]:
    """Compiled and batched. Only what is asked for is returned, so the compiler drops the rest."""
    jax, dx = import_module("jax"), import_module("dynamax.hidden_markov_model.inference")
    initial, transition = (jax.numpy.asarray(x.numpy()) for x in problem.probabilities[:2])
    given = jax.numpy.asarray(problem.log_likelihoods.numpy())
    columns = jax.numpy.asarray(problem.hmm.log_emission.T.contiguous().numpy())
    ids = jax.numpy.asarray(problem.ids.numpy())
    keys = jax.random.split(jax.random.PRNGKey(problem.seed), len(problem.ids))

    def compiled(function: Callable[..., Any], axes: tuple[int | None, ...], *values: Any) -> Callable[[], Any]:
        call = jax.jit(jax.vmap(function, in_axes=axes))
        return lambda: jax.block_until_ready(call(*values))

    def smoothed(i: Any, a: Any, e: Any, x: Any) -> Any:
        return dx.hmm_smoother(i, a, e[x]).smoothed_probs

    chain, own = (initial, transition), (None, None, 0)
    return {
        "smoother": Contender(
            compiled(lambda i, a, x: dx.hmm_smoother(i, a, x).smoothed_probs, own, *chain, given), _tensor
        ),
        "smoother_tokens": Contender(compiled(smoothed, (None, None, None, 0), *chain, columns, ids), _tensor),
        "sample_latents": Contender(
            compiled(lambda k, i, a, x: dx.hmm_posterior_sample(k, i, a, x)[1], (0, *own), keys, *chain, given), _tensor
        ),
        "log_prob": Contender(
            compiled(
                lambda i, a, e, x: dx.hmm_filter(i, a, e[x]).marginal_loglik,
                (None, None, None, 0),
                *chain,
                columns,
                ids,
            ),
            lambda x: _tensor(x).sum(),
        ),
    }


def pomegranate(problem: Problem) -> dict[str, Contender]:
    """Forward and backward messages from emissions (``forward_backward`` would count transitions on top)."""
    module = import_module("pomegranate.hmm")
    categorical = import_module("pomegranate.distributions").Categorical
    initial, transition, emission = problem.probabilities
    model = module.DenseHMM(
        [categorical(row[None]) for row in emission], edges=transition, starts=initial, ends=torch.ones_like(initial)
    )
    given, tokens = problem.log_likelihoods, problem.ids[..., None]

    def smoother() -> Tensor:
        joint: Tensor = model.forward(emissions=given) + model.backward(emissions=given)
        return joint.log_softmax(-1)

    return {
        "smoother": Contender(smoother, torch.exp),
        "smoother_tokens": Contender(lambda: model.predict_proba(tokens), _same),
        "log_prob": Contender(lambda: model.log_probability(tokens), torch.sum),
    }


def hmmlearn(problem: Problem) -> dict[str, Contender]:
    """Float64, from observed tokens; of its two implementations the faster one."""
    model = import_module("hmmlearn.hmm").CategoricalHMM(
        n_components=problem.hmm.num_states, n_features=problem.hmm.vocab_size, implementation="scaling"
    )
    tables = [table.double() for table in problem.probabilities]
    model.startprob_, model.transmat_, model.emissionprob_ = ((x / x.sum(-1, keepdim=True)).numpy() for x in tables)
    batch, length = problem.ids.shape
    flat, lengths = problem.ids.reshape(-1, 1).numpy(), [length] * batch
    return {
        "smoother_tokens": Contender(
            lambda: model.predict_proba(flat, lengths), lambda x: _tensor(x).view(batch, length, -1)
        ),
        "log_prob": Contender(lambda: model.score(flat, lengths), torch.tensor),
    }


def libcirkit(problem: Problem) -> dict[str, Contender]:
    """The chain of its templates.pgms.hmm with our tables, compiled; not folded, which here is the faster choice."""
    layers, parameters = import_module("cirkit.symbolic.layers"), import_module("cirkit.symbolic.parameters")
    constant = import_module("cirkit.symbolic.initializers").ConstantTensorInitializer
    scope, circuit = import_module("cirkit.utils.scope").Scope, import_module("cirkit.symbolic.circuit").Circuit
    pipeline = import_module("cirkit.pipeline").PipelineContext
    hmm, length = problem.hmm, problem.ids.shape[1]
    states = hmm.num_states

    def table(values: Tensor) -> Any:
        start = constant(values.numpy())
        return parameters.Parameter.from_input(parameters.TensorParameter(*values.shape, initializer=start))

    def leaf(position: int) -> Any:
        return layers.CategoricalLayer(
            scope([position]), states, num_categories=hmm.vocab_size, logits=table(hmm.log_emission)
        )

    initial, transition, _ = problem.probabilities
    top = leaf(length - 1)
    nodes, inputs = [top], {}
    for position in reversed(range(length - 1)):
        step, here = layers.SumLayer(states, states, weight=table(transition)), leaf(position)
        joint = layers.HadamardLayer(states, 2)
        inputs[step], inputs[joint] = [top], [step, here]
        nodes += [step, here, joint]
        top = joint
    root = layers.SumLayer(states, 1, weight=table(initial[None]))
    inputs[root] = [top]
    symbolic = circuit([*nodes, root], inputs, [root])
    model = pipeline(backend="torch", semiring="lse-sum", fold=False, optimize=True).compile(symbolic)
    return {"log_prob": Contender(lambda: model(problem.ids), torch.sum)}


@dataclass(frozen=True)
class Rival:
    """Another library: the modules it needs, the packages whose versions are reported, its adapter, how to get it."""

    modules: tuple[str, ...]
    packages: tuple[str, ...]
    build: Callable[[Problem], dict[str, Contender]]
    source: str = "'codd-lm[bench]'"


RIVALS: Mapping[str, Rival] = {
    "dynamax": Rival(("jax", "dynamax"), ("jax", "dynamax"), dynamax),
    "pomegranate": Rival(("pomegranate",), ("pomegranate",), pomegranate),
    "hmmlearn": Rival(("hmmlearn",), ("hmmlearn",), hmmlearn),
    "libcirkit": Rival(("cirkit",), ("libcirkit",), libcirkit, "libcirkit"),
}


def _same(x: Tensor) -> Tensor:
    return x


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x))


def installed(rival: Rival) -> bool:
    """Whether all its modules can be found."""
    return all(importlib.util.find_spec(module) is not None for module in rival.modules)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give PyTorch this many threads, and JAX too if it has not started yet: it reads the environment only then."""
    before, environment = torch.get_num_threads(), dict(os.environ)
    if count != os.cpu_count() and "jax" not in sys.modules:
        os.environ["NPROC"] = os.environ["PJRT_NPROC"] = str(count)
        if count == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        for name in ("NPROC", "PJRT_NPROC", "XLA_FLAGS"):
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)


def difference(query: str, problem: Problem, theirs: Tensor, mine: Tensor) -> float:
    """How far an answer is from ours relative to the largest entry; of samples only shape and range are looked at."""
    if theirs.shape != mine.shape:
        return float("inf")
    if "sample" in query:
        top = problem.hmm.num_states if query == "sample_latents" else problem.hmm.vocab_size
        return 0.0 if bool(((theirs >= 0) & (theirs < top)).all()) else float("inf")
    return float((theirs.double() - mine.double()).abs().max() / mine.double().abs().max())


def run(settings: Settings, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Check and time everyone; a report of plain numbers, strings, lists and dictionaries."""
    threads = settings.threads or os.cpu_count() or 1
    settings = replace(settings, threads=threads)
    # Rivals warn about their own affairs, when imported and when called.
    with _threads(threads), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = Problem.of(settings)
        field, absent = _contenders(problem, settings, progress)
        queries = {query: _measure(query, field, problem, settings, progress) for query in QUERIES}
        return {
            "machine": provenance("cpu", torch.float32),
            "settings": asdict(settings),
            "versions": versions(),
            "absent": absent,
            "queries": queries,
            "sparse": _sparse_summary(queries, problem),
        }


def _contenders(
    problem: Problem, settings: Settings, progress: Callable[[str], None]
) -> tuple[dict[str, dict[str, Contender]], dict[str, str]]:
    """Who takes part, and why the others do not."""
    top = f"{OURS}, top-{problem.kept}"
    field = {
        OURS: ours(problem),
        top: ours_sparse(problem, selecting=False),
        f"{top} + selection": ours_sparse(problem, selecting=True),
        "plain PyTorch": plain(problem),
    }
    absent = {}
    for name, rival in RIVALS.items():
        if not installed(rival):
            absent[name] = f"not installed (pip install {rival.source})"
            continue
        progress(f"preparing {name}")
        try:
            field[name] = rival.build(problem)
        except Exception as error:  # another library's failure is a line of the report, not the end of the run
            absent[name] = f"failed: {type(error).__name__}: {error}"
    return field, absent


def _measure(
    query: str,
    field: Mapping[str, Mapping[str, Contender]],
    problem: Problem,
    settings: Settings,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The answers of one query compared with ours, then the times of those that agree."""
    entries = {name: queries[query] for name, queries in field.items() if query in queries}
    mine = entries[OURS].answer(entries[OURS].call())
    rows: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        try:
            answer = entry.answer(entry.call())
        except Exception as error:  # as above
            rows[name] = {"status": f"failed: {type(error).__name__}: {error}"}
            continue
        off = difference(query, problem, answer, mine)
        if entry.exact and not off <= TOLERANCE:
            rows[name] = {"status": f"a different answer, off by {off:.2g}: not timed"}
        else:
            rows[name] = {"status": "ok" if entry.exact else "approximate", "difference": off}
            if not entry.exact:
                rows[name]["error_nats"] = float((answer - mine).abs().max())
    agreed = {name: entries[name].call for name, row in rows.items() if "difference" in row}
    progress(f"{query}: {len(agreed)} contenders, {settings.rounds} rounds")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)  # again: importing pomegranate resets it
    now = time.process_time if settings.threads == 1 else time.perf_counter
    times = interleaved(agreed, settings.rounds, burst=settings.burst, now=now)
    for name, timing in times.items():
        rows[name] |= _numbers(timing, times[OURS])
    return {"title": QUERIES[query], "rows": rows}


def _numbers(timing: Timing, mine: Timing) -> dict[str, Any]:
    return {
        "ms": asdict(timing.milliseconds),
        "times_ours": asdict(timing.over(mine)),
        "ours_over": asdict(mine.over(timing)),
    }


def _sparse_summary(queries: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """What top-k evidence gains and costs."""
    names = [name for name in queries["log_partition"]["rows"] if name.startswith(f"{OURS}, ")]
    kept = SparsePotentials.from_logits(problem.logits, problem.kept).log_weights.exp().sum(-1)
    return {
        "kept": problem.kept,
        "mass_kept": float(kept.mean()),
        "error_nats": queries["log_partition"]["rows"][names[0]].get("error_nats"),
        "dense_over_sparse": {
            query: {name: queries[query]["rows"][name].get("ours_over") for name in names}
            for query in ("log_partition", "log_partition_sample")
        },
    }


def versions() -> dict[str, str]:
    """The versions of this library, of PyTorch and of the rivals that are installed."""
    packages = ["codd-lm", "torch", *(p for rival in RIVALS.values() if installed(rival) for p in rival.packages)]
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def render(report: Mapping[str, Any]) -> RenderableType:
    """A header, a table a query, and what top-k evidence gains."""
    where, chosen = report["machine"], report["settings"]
    lines = [
        f"{where['machine']}, {where['threads']} thread(s), {where['dtype']}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        f"V = {chosen['tokens']}, N = {chosen['states']}, L = {chosen['length']}, B = {chosen['batch']}, "
        f"seed {chosen['seed']}, {chosen['rounds']} interleaved rounds in bursts of {chosen['burst']}",
        where["command"],
        *(f"{name}: {reason}" for name, reason in report["absent"].items()),
    ]
    tables = [_table(query) for query in report["queries"].values()]
    return Group(Text("\n".join(lines)), *tables, Text("\n".join(_sparse_lines(report["sparse"]))))


def _table(query: Mapping[str, Any]) -> Table:
    table = Table(title=query["title"], title_justify="left")
    table.add_column("")
    for heading in ("ms (median)", "quartiles", "times ours (quartiles)", "difference"):
        table.add_column(heading, justify="right")
    for name, row in query["rows"].items():
        if "ms" not in row:
            table.add_row(name, "-", "", "", Text(row["status"]))
            continue
        ms, ratio = Spread(**row["ms"]), Spread(**row["times_ours"])
        nats = row.get("error_nats")
        off = f"{row['difference']:.0e}" if nats is None else f"{nats:.2g} nats"
        table.add_row(
            name,
            f"{ms.median:.2f}",
            f"{ms.lower:.2f} to {ms.upper:.2f}",
            f"{ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})",
            off,
        )
    return table


def _sparse_lines(sparse: Mapping[str, Any]) -> list[str]:
    error = "unknown" if sparse["error_nats"] is None else f"{sparse['error_nats']:.2g} nats"
    lines = [f"top-{sparse['kept']} evidence holds {sparse['mass_kept']:.1%} of the mass; log Z is off by {error}."]
    for query, ratios in sparse["dense_over_sparse"].items():
        for name, ratio in ratios.items():
            if ratio is not None:
                lines.append(
                    f"{query}: dense / {name.removeprefix(f'{OURS}, ')} = {ratio['median']:.2f} "
                    f"({ratio['lower']:.2f} to {ratio['upper']:.2f})"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        convert = float if field.name == "sharpness" else int
        parser.add_argument(f"--{field.name}", type=convert, default=field.default)
    parser.add_argument("--json", type=Path, help="also write the report here")
    options = vars(parser.parse_args())
    out: Path | None = options.pop("json")
    console = Console()
    with console.status("preparing") as status:
        report = run(Settings(**options), status.update)
    console.print(render(report))
    save(report, out)


if __name__ == "__main__":
    main()
