"""The published decoding loops once more, in loops over one sequence and float64, from their description alone.

Nothing here comes from codd. ``network`` maps ids to an array of logits (L, V), the one for position i in row i.
``draw`` gives so many uniform numbers; what they are for is drawn in this order, each only if it is needed: the scores
of targets at random, the latent path (a number for every position of the window), tokens (block diffusion of LLaDA: a
number for every masked position and token; Dream: a number for every masked position), random confidences. Masked
positions are those up to the end of the block, or all.

Every decision that depends on rounding notes by how much it was taken: ``Turn.path_gap``, ``order_gap``, ``token_gap``
and ``count_gap``.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Network = Callable[[list[int]], Array]
Draw = Callable[[int], Array]


@dataclass(frozen=True)
class Chain:
    """A hidden Markov model as probabilities."""

    initial: Array
    transition: Array
    emission: Array


@dataclass(frozen=True)
class Settings:
    gen_length: int
    steps: int
    mask: int
    alg: str = "low_confidence"
    block_length: int = 0
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    cfg_scale: float = 0.0
    chain: Chain | None = None
    tau: float = 1.0
    frac: float = math.inf
    window: int = 0


@dataclass
class Turn:
    """One evaluation of the network."""

    before: list[int]
    after: list[int]
    positions: list[int]
    tokens: list[int]
    ratio: float
    circuit: bool
    window: tuple[int, int]
    path: list[int] = field(default_factory=list)
    targets: set[int] = field(default_factory=set)
    coverage: int = 0
    unmodified: dict[int, int] = field(default_factory=dict)
    """Of the positions whose scores the circuit changed, the most probable token before."""
    path_gap: float = math.inf
    order_gap: float = math.inf
    """Between the last position that was chosen and the first that was not."""
    inner_gap: float = math.inf
    """Between any two that follow each other among the chosen."""
    token_gap: float = math.inf
    """Between the best and the second token of a chosen position, or a token's number and the edges of its interval."""
    count_gap: float = math.inf
    """From a number that was cut to the next integer."""

    @property
    def must(self) -> set[int]:
        return {t for t in self.targets if not self.window[0] <= t < self.window[1]}


def log_softmax(row: Array) -> Array:
    shifted = row - row.max()
    return shifted - math.log(np.exp(shifted).sum())


def softmax(row: Array) -> Array:
    return np.exp(log_softmax(row))


def inverse_cdf(weights: Array, uniform: float) -> tuple[int, float]:
    """The first index whose cumulative share exceeds the number, and how near the number came to an edge."""
    edges = np.cumsum(weights) / weights.sum()
    index = next(i for i in range(len(edges)) if edges[i] > uniform)
    inner = [edges[i] for i in range(len(edges) - 1) if weights[i] > 0 or i == 0]
    return index, min((abs(edge - uniform) for edge in inner), default=math.inf)


def circuit_scores(
    chain: Chain, logits: Array, ids: Sequence[int], mask: int, tau: float, uniforms: Array
) -> tuple[Array, list[int], float]:
    """Spec 1.7, steps 3 to 7, on one window: the scores, the path and how sure it is."""
    length, states = len(ids), len(chain.initial)
    log_phi = [log_softmax(row / tau if 0 < tau < 1 else row) for row in logits]
    leaf = np.zeros((length, states))
    for t in range(length):
        for i in range(states):
            if ids[t] == mask:
                leaf[t, i] = sum(chain.emission[i] * np.exp(log_phi[t]))
            else:
                leaf[t, i] = chain.emission[i, ids[t]] * math.exp(log_phi[t][ids[t]])
        leaf[t] /= leaf[t].max()  # a factor that does not depend on the state changes no posterior
    backward = np.ones((length, states))
    for t in range(length - 2, -1, -1):
        for i in range(states):
            backward[t, i] = sum(chain.transition[i] * leaf[t + 1] * backward[t + 1])
        backward[t] /= backward[t].max()
    path, gap = [], math.inf
    weights = chain.initial * leaf[0] * backward[0]
    for t in range(length):
        if t > 0:
            weights = chain.transition[path[-1]] * leaf[t] * backward[t]
        state, near = inverse_cdf(weights, float(uniforms[t]))
        path.append(state)
        gap = min(gap, near)
    with np.errstate(divide="ignore"):
        scores = np.stack([log_phi[t] + np.log(chain.emission[path[t]]) for t in range(length)])
    return scores, path, gap


def filtered(row: Array, top_p: float | None, top_k: int | None) -> Array:
    """What `sample_tokens` leaves of a row of logits."""
    if top_p is not None and top_p < 1:
        p, total, kept = softmax(row), 0.0, set()
        for v in sorted(range(len(row)), key=lambda v: -row[v]):
            kept.add(v)
            total += p[v]
            if total > top_p:
                break
        row = np.array([row[v] if v in kept else -np.inf for v in range(len(row))])
    if top_k is not None:
        least = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        row = np.where(row < least, -np.inf, row)
    return row


def spread(p: Array, alg: str) -> float:
    if alg == "margin":
        first, second = sorted(p, reverse=True)[:2]
        return float(first - second)
    assert alg == "entropy"
    return float(sum(p * np.log(p + 1e-10)))


def best(row: Array) -> tuple[int, float]:
    """The best token, and the distance of the second."""
    top = sorted(row, reverse=True)
    return int(np.argmax(row)), float(top[0] - top[1])


Candidates = tuple[dict[int, int], dict[int, float], dict[int, float]]
"""Of every masked position the token, the confidence, and how sure the token is."""


def llada_candidates(logits: dict[int, Array], how: Settings, draw: Draw) -> Candidates:
    """Spec 2.2, steps 4 and 5."""
    tokens, confidence, sure = {}, {}, {}
    noisy = dict(logits)
    if how.temperature > 0:
        vocab = len(next(iter(logits.values())))
        noise = draw(len(logits) * vocab).reshape(len(logits), vocab)
        for row, place in enumerate(logits):
            race = (-np.log(noise[row])) ** how.temperature
            noisy[place] = np.exp(logits[place]) / race
    for place, row in noisy.items():
        tokens[place], sure[place] = best(np.log(row) if how.temperature > 0 else row)
        if how.alg == "low_confidence":
            confidence[place] = float(softmax(logits[place])[tokens[place]])
        elif how.alg != "random":
            confidence[place] = spread(softmax(row), how.alg)
    if how.alg == "random":
        confidence = dict(zip(logits, draw(len(logits)).tolist(), strict=True))
    return tokens, confidence, sure


def dream_candidates(logits: dict[int, Array], how: Settings, draw: Draw) -> Candidates:
    """Spec 3.1, `sample_tokens`, and the confidences of 3.2 to 3.4."""
    tokens, confidence, sure = {}, {}, {}
    uniforms = draw(len(logits)) if how.temperature > 0 else np.zeros(len(logits))
    for uniform, (place, row) in zip(uniforms, logits.items(), strict=True):
        p = softmax(filtered(row / how.temperature if how.temperature > 0 else row, how.top_p, how.top_k))
        if how.temperature > 0:
            tokens[place], sure[place] = inverse_cdf(p, float(uniform))
        else:
            tokens[place], sure[place] = best(row)
        if how.alg == "low_confidence":
            confidence[place] = float(p[tokens[place]])
        elif how.alg == "topprob":
            confidence[place] = float(softmax(row).max())
        elif how.alg not in ("origin", "random"):
            confidence[place] = spread(p, how.alg)
    if how.alg in ("origin", "random"):
        confidence = dict(zip(logits, draw(len(logits)).tolist(), strict=True))
    return tokens, confidence, sure


def largest(confidence: dict[int, float], count: int) -> tuple[list[int], float, float]:
    """The positions with the largest confidences in their order, the gap after the last and the least one before."""
    order = sorted(confidence, key=lambda place: (-confidence[place], place))
    values = [confidence[place] for place in order]
    # What is equal in float64 are positions of which the filters left one token: the leftmost comes first, surely.
    gaps = [(a - b) or math.inf for a, b in itertools.pairwise(values)]
    after = gaps[count - 1] if 0 < count < len(values) else math.inf
    inner = min(gaps[: max(min(count, len(values)) - 1, 0)], default=math.inf)
    return order[:count], after, inner


def share_masked(ids: Sequence[int], window: tuple[int, int], mask: int) -> float:
    begin, end = window
    return sum(token == mask for token in ids[begin:end]) / (end - begin)


def modify(
    logits: dict[int, Array],
    full: Array,
    ids: list[int],
    window: tuple[int, int],
    how: Settings,
    draw: Draw,
    turn: Turn,
) -> None:
    """Write the circuit's scores over the logits of a window."""
    assert how.chain is not None
    begin, end = window
    scores, turn.path, turn.path_gap = circuit_scores(
        how.chain, full[begin:end], ids[begin:end], how.mask, how.tau, draw(end - begin)
    )
    for place in logits:
        if begin <= place < end:
            turn.unmodified[place] = int(np.argmax(logits[place]))
            logits[place] = scores[place - begin]


def commit(turn: Turn, chosen: list[int], candidates: Candidates) -> None:
    tokens, _, sure = candidates
    turn.positions, turn.tokens = chosen, [tokens[place] for place in chosen]
    turn.token_gap = min((sure[place] for place in chosen), default=math.inf)
    for place in chosen:
        turn.after[place] = tokens[place]


def evaluate(network: Network, ids: list[int], prompt: list[bool], how: Settings) -> Array:
    conditional = network(ids)
    if how.cfg_scale <= 0:
        return conditional
    without = network([how.mask if given else token for token, given in zip(ids, prompt, strict=True)])
    return without + (how.cfg_scale + 1) * (conditional - without)


def block_diffusion(network: Network, prompt: list[int], how: Settings, draw: Draw, *, dream: bool) -> list[Turn]:
    """Spec 2, and with ``dream`` spec 3.3."""
    ids = [*prompt, *[how.mask] * how.gen_length]
    given = [token != how.mask for token in ids]
    blocks = how.gen_length // how.block_length
    steps = how.steps // blocks
    turns = []
    for number in range(blocks):
        begin = len(prompt) + number * how.block_length
        end = begin + how.block_length
        masks = sum(token == how.mask for token in ids[begin:end])
        for i in range(steps):
            count = masks // steps + (i < masks % steps)
            full = evaluate(network, ids, given, how)
            ratio = share_masked(ids, (begin, end), how.mask)
            places = [place for place in range(end) if ids[place] == how.mask]
            # Where nothing is masked any more there is nothing for the circuit to change.
            acts = how.chain is not None and ratio < how.frac and len(places) > 0
            turn = Turn(list(ids), list(ids), [], [], ratio, acts, (begin, end))
            logits = {place: full[place] for place in places}
            if acts:
                modify(logits, full, ids, (begin, end), how, draw, turn)
            if places:
                candidates = (dream_candidates if dream else llada_candidates)(logits, how, draw)
                chosen, turn.order_gap, turn.inner_gap = largest(candidates[1], count)
                commit(turn, chosen, candidates)
            ids = turn.after
            turns.append(turn)
    return turns


def reveal_counts(masks: int, step: int, how: Settings) -> tuple[int, float]:
    """Spec 3.1: K_i in float32, and how far the number that is cut is from an integer."""
    if step == how.steps - 1:
        return masks, math.inf
    t, s = before_and_after(step, how)
    value = np.float32(masks) * (np.float32(1) - s / t)
    return int(value), abs(float(value) - round(float(value)))


def before_and_after(step: int, how: Settings) -> tuple[np.float32, np.float32]:
    times = np.linspace(1, 1e-3, how.steps + 1, dtype=np.float64).astype(np.float32)
    return times[step], times[step + 1]


def plain_diffusion(network: Network, prompt: list[int], how: Settings, draw: Draw) -> list[Turn]:
    """Spec 3.2."""
    ids = [*prompt, *[how.mask] * how.gen_length]
    turns = []
    for i in range(how.steps):
        full = network(ids)
        places = [place for place in range(len(ids)) if ids[place] == how.mask]
        everything = (0, len(ids))
        turn = Turn(list(ids), list(ids), [], [], share_masked(ids, everything, how.mask), False, everything)
        count, turn.count_gap = reveal_counts(len(places), i, how)
        if places:
            candidates = dream_candidates({place: full[place] for place in places}, how, draw)
            coins = candidates[1]
            if how.alg == "origin":
                t, s = before_and_after(i, how)
                keep = float(s / t) if i < how.steps - 1 else -1.0
                chosen = sorted((place for place in places if coins[place] > keep), key=lambda place: -coins[place])
                turn.order_gap = min(abs(coin - keep) for coin in coins.values())
            else:
                chosen, turn.order_gap, turn.inner_gap = largest(coins, count)
            commit(turn, chosen, candidates)
        ids = turn.after
        turns.append(turn)
    return turns


def selection_score(row: Array, alg: str) -> float:
    """Spec 3.4, step 1. Upstream has no maskgit_plus there; the probability of the best token is what it would be."""
    p = softmax(row)
    if alg == "entropy":
        return float(sum(x * math.log(x) for x in p if x > 0))
    if alg == "margin":
        first, second = sorted(p, reverse=True)[:2]
        return float(first - second)
    return float(p.max())


def target_window(targets: set[int], total: int, size: int) -> tuple[int, int]:
    """Spec 3.4, step 2: where the window begins, and how many targets it covers; nothing covered: at 0."""
    begin, most = 0, 0
    for target in sorted(targets):
        u = target - size // 2
        v = u + size
        if u < 0:
            u, v = 0, size
        if v > total:
            u, v = total - size, total
        covered = len([t for t in targets if u <= t < v])
        if covered > most:
            begin, most = u, covered
    return begin, most


def windowed_diffusion(network: Network, prompt: list[int], how: Settings, draw: Draw) -> list[Turn]:
    """Spec 3.4."""
    ids = [*prompt, *[how.mask] * how.gen_length]
    turns = []
    for i in range(how.steps):
        full = network(ids)
        places = [place for place in range(len(ids)) if ids[place] == how.mask]
        count, count_gap = reveal_counts(len(places), i, how)
        targets, target_gap = set[int](), math.inf
        if len(places) >= 2:
            if how.alg in ("origin", "random"):
                score = dict(zip(places, draw(len(places)).tolist(), strict=True))
            else:
                score = {place: selection_score(full[place], how.alg) for place in places}
            first, target_gap, _ = largest(score, count)
            targets = set(first)
        begin, coverage = target_window(targets, len(ids), how.window)
        window = (begin, begin + how.window)
        ratio = share_masked(ids, window, how.mask)
        acts = coverage > 1 and ratio < how.frac
        turn = Turn(list(ids), list(ids), [], [], ratio, acts, window, targets=targets, coverage=coverage)
        turn.count_gap = count_gap
        logits = {place: full[place] for place in places}
        if acts:
            modify(logits, full, ids, window, how, draw, turn)
        if places:
            candidates = dream_candidates(logits, how, draw)
            confidence = candidates[1]
            for place in places:
                if acts and not begin <= place < begin + how.window:
                    confidence[place] = -1e9
                if place in turn.must:
                    confidence[place] = 1e9
            chosen, after, _ = largest(confidence, count)
            free = {place: value for place, value in confidence.items() if abs(value) < 1e9}
            turn.inner_gap = largest(free, max(count - len(turn.must), 0))[2]
            turn.order_gap = min(after, target_gap)
            commit(turn, chosen, candidates)
        ids = turn.after
        turns.append(turn)
    return turns
