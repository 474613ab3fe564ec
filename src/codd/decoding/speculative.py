"""Speculative decoding: network and circuit draft several tokens in one call, a causal model checks them in another.

A round is two steps, each one network evaluation. The draft writes nothing: tokens after the text from left to right,
each drawn from q(x_t | x_<t), which the circuit gives exactly. The check reads them with the causal model, whose
distributions p(x_t | x_<t) accept or refuse them: at temperature 0 the longest prefix that agrees, above it each token
with probability min(1, p / q). What follows is drawn from p - q where it is positive, or from p if all were accepted.
The text is the causal model's own, whatever was drafted: the same tokens at temperature 0, the same distribution above.
"""

import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.backbones.causal import (
    CausalModel,
    CausalReader,
    check_causal,
    check_same_tokens,
    load_causal,
    on_shared_tokens,
)
from codd.circuits import HMM
from codd.circuits.sampling import draw_token
from codd.decoding.loop import check_scores, finish_step, step_inputs, without_circuit
from codd.decoding.options import DEFAULTS, Options
from codd.decoding.samplers import (
    Noise,
    StepInputs,
    circuit_acts,
    fit_window,
    logits_temperature,
    sample_any_order,
    temper_conditional,
    token_distribution,
)
from codd.decoding.sequence import Alternatives, SequenceState, Step, StepPlan, Writes
from codd.errors import InvalidInput, shown

if TYPE_CHECKING:
    from codd.decoding.model import Model

FOLDER = "causal"
"""Where a checkpoint keeps the causal model that checks its drafts."""
EXPECTED = 16
"""What a sequence's average of accepted tokens, which the length of its drafts follows, begins with."""
MEMORY = 0.5
"""The weight of the latest draft in that average."""
PATIENCE = 0.1
"""What each check without a draft adds to that average, so that drafts are tried again."""


class Draft(NamedTuple):
    """Tokens that follow the text, and what each was drawn from given those before it."""

    tokens: Int[Tensor, " K"]
    probabilities: Float[Tensor, "K V"]


def verdict(draft: Draft, p: Float[Tensor, "more V"]) -> tuple[Float[Tensor, " K"], Float[Tensor, "more V"]]:
    """Speculative sampling's rule: with it a token and what may take its place have the checker's distribution.

    Args:
        draft: Its probabilities are those that the tokens were drawn from, or one-hot at temperature 0.
        p: The checker's distribution of each drafted token given those before it, and of the one after all.

    Returns:
        The probability of accepting each token once those before it are, and the distribution of the token that takes
        the place of each if it is refused, and of the one after all.
    """
    p, q = p.double(), draft.probabilities.double()
    chosen = draft.tokens[:, None]
    accept = (p[:-1].gather(-1, chosen) / q.gather(-1, chosen))[:, 0].clamp(max=1)
    rest = (p[:-1] - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    # Where p and q are equal nothing is ever refused, but for what rounding does.
    follow = torch.where(total > 0, rest / torch.where(total > 0, total, 1), p[:-1])
    return accept, torch.cat((follow, p[-1:]))


def judge(
    draft: Draft, p: Float[Tensor, "more V"], uniforms: Float[Tensor, " more"]
) -> tuple[int, Int[Tensor, " written"]]:
    """How many drafted tokens are accepted, and all that is written: these and the token that follows them."""
    accept, follow = verdict(draft, p)
    accepted = int((uniforms[:-1].to(accept) < accept).cumprod(0).sum())
    last = draw_token(follow[accepted : accepted + 1], uniforms[-1:].to(follow))
    return accepted, torch.cat((draft.tokens[:accepted], last))


def draft_tokens(inputs: StepInputs, count: int, uniforms: Float[Tensor, " K"]) -> tuple[Draft, bool]:
    """Draft the first tokens of a step's window, and whether the circuit took part.

    At temperature 0 each token is the most probable one given those before it, above it it is drawn.
    """
    state, options = inputs.state, inputs.options
    circuit, window = inputs.circuit, inputs.plan.block
    fitted = fit_window(window, circuit, len(state.ids))
    acts = circuit is not None and fitted is not None and circuit_acts(circuit, state, window)
    if circuit is None or fitted is None or not acts:
        circuit, fitted = HMM.neutral(1, inputs.logits.shape[-1]).to(inputs.logits.device), window
    joint = inputs.window(fitted).joint(circuit, logits_temperature(options))
    first, device = int(inputs.positions[0]) - fitted[0], inputs.logits.device
    if options.temperature == 0:
        in_order = options.changed(mode="block", remasking="left_to_right", steps=None)
        found = sample_any_order(joint, count, in_order, Noise(*torch.zeros(3, len(joint.masked[0]), device=device)))
        valid, tokens = bool(found.valid), found.tokens
        q = torch.nn.functional.one_hot(tokens, inputs.logits.shape[-1]).float()
    else:
        conditioner, rows, drawn = joint.conditionals(), [], []
        valid = bool(conditioner.log_partition[0] > -torch.inf)
        for number in range(count if valid else 0):
            at = torch.tensor([first + number], device=device)
            rows.append(distribution(temper_conditional(conditioner.dense_log_marginals(at), options), options))
            drawn.append(draw_token(rows[-1], uniforms[number : number + 1].to(device)))
            conditioner.commit(at, drawn[-1])
        tokens, q = (torch.cat(parts) for parts in (drawn, rows)) if valid else (joint.tokens[0], inputs.logits)
    if not valid and acts:
        return draft_tokens(without_circuit(inputs), count, uniforms)
    return Draft(tokens, q), acts


def distribution(scores: Float[Tensor, "R V"], options: Options) -> Float[Tensor, "R V"]:
    """What tokens are drawn from, given scores of all tokens: tempered and cut as the options say."""
    return token_distribution(scores, options.temperature, options.top_k, options.top_p)


class Speculation:
    """How one sequence is drafted and checked: what its causal model has read, and the draft that waits for a check."""

    def __init__(self, checker: CausalModel, vocab_size: int, length: int):
        """For a text of at most ``length`` of the network's ``vocab_size`` tokens."""
        self._checker, self._vocab_size, self._length = checker, vocab_size, length
        self._reader: CausalReader | None = None
        self._draft: Draft | None = None
        self._accepted = float(EXPECTED)
        """The average of tokens accepted lately."""

    def plan_steps(self, state: SequenceState) -> Iterator[StepPlan]:
        """A draft and, as the ``last`` step of each round, a check, which writes one token more than it accepts.

        A draft is half as long again as what was accepted lately, and two tokens more; its window is a block after the
        text, or what is left of a block-causal network's block. Where less than one token of a draft was accepted
        lately, checks come without drafts: plain causal decoding.
        """
        size = state.block_size
        while (begin := state.settled) < len(state.ids):
            first = begin - state.causal_context  # the block's first token is the causal network's
            end = first + state.options.block_length if size is None else (begin // size + 1) * size
            end = min(end, len(state.ids))
            wanted = 2 + round(1.5 * self._accepted) if self._accepted >= 1 else 0
            count = min(wanted, end - begin, len(state.ids) - begin - 1)
            if count:
                yield StepPlan(first, end, count, last=False)
            yield StepPlan(begin, begin + count + 1, count + 1, last=True)

    def step(self, state: SequenceState) -> Generator[Any, Any, Step]:
        """One step of a sequence, as `codd.decoding.loop.denoising_step` makes it: a draft, or a check."""
        plan = state.plan
        assert plan is not None, "a finished sequence takes no step"
        if not plan.last:
            inputs = yield from step_inputs(state)
            yield None
            uniforms = torch.rand(plan.count, generator=state.generator)
            self._draft, acts = draft_tokens(inputs, plan.count, uniforms)
            return finish_step(state, Writes.none(), plan.block, state.mask_ratio(plan.block), acts)
        yield []  # nothing is asked of the network,
        yield []  # nor of its head
        yield None
        return self._check(state, plan)

    def _check(self, state: SequenceState, plan: StepPlan) -> Step:
        """Read the draft with the causal model, and write what it accepts and one token more."""
        options, begin = state.options, plan.begin
        if self._reader is None:
            self._reader = CausalReader(self._checker.network, 1, self._length)
        self._reader.rewind(begin - 1)
        device, none = self._checker.network.device, torch.zeros(0, self._vocab_size)
        draft = self._draft or Draft(none[:, 0].long(), none)
        state.cached = self._reader.length
        text = torch.cat((state.ids[state.cached : begin], draft.tokens.cpu()))[None]
        state.computed = text.shape[1]
        logits = on_shared_tokens(self._reader.read(text, len(draft.tokens) + 1)[0], self._vocab_size)
        assert state.banned is not None
        logits = logits.index_fill(-1, state.banned.to(device), -torch.inf).to(draft.tokens.device)
        uniforms = torch.rand(len(draft.tokens) + 1, generator=state.generator).to(logits.device)
        accepted, tokens = judge(draft, distribution(logits, options), uniforms)
        log_p = logits[: len(tokens)].log_softmax(-1)
        scores = log_p.gather(-1, tokens[:, None])[:, 0].exp().cpu()
        written = Writes(torch.arange(begin, begin + len(tokens)), tokens.cpu(), scores)
        check_scores(state, written)
        top = log_p.topk(min(state.alternatives, log_p.shape[-1]), dim=-1)
        self._accepted += MEMORY * (accepted - self._accepted) if len(draft.tokens) else PATIENCE
        self._draft = None
        return finish_step(
            state,
            written,
            plan.block,
            state.mask_ratio(plan.block),
            circuit=False,
            drafted=len(draft.tokens),
            accepted=accepted,
            alternatives=Alternatives(top.indices.cpu(), top.values.cpu()) if state.alternatives else None,
        )


def begin(model: "Model", sequences: Sequence[SequenceState], verifier: Any) -> None:
    """Plan the first draft of each sequence; InvalidInput where there is no checker for them."""
    checker = checker_for(model, verifier)
    for state in sequences:
        if not state.prompt_length or not bool(state.given[: state.prompt_length].all()):
            found = "has masks" if state.prompt_length else "is empty"
            raise InvalidInput(f'prompt {state.number} {found}: mode="speculative" writes after a text alone.')
        if checker.max_length is not None and len(state.ids) > checker.max_length:
            raise InvalidInput(
                f"prompt {state.number} with gen_length {state.options.gen_length} makes {len(state.ids)} tokens, but "
                f"the verifier was made for {checker.max_length}: shorten the prompt or gen_length."
            )
        state.speculation = Speculation(checker, model.backbone.vocab_size, len(state.ids))
        state.begin(state.speculation.plan_steps(weakref.proxy(state)))


def checker_for(model: "Model", verifier: Any) -> CausalModel:
    """The model that checks: ``verifier``, or the network's own causal mode, or the one in the model's folder."""
    backbone = model.backbone
    if verifier is None and backbone.causal is not None:
        return CausalModel(backbone.causal, model.tokenizer, backbone.max_length)
    if verifier is None and model.folder is not None and (model.folder / FOLDER).is_dir():
        verifier = model.folder / FOLDER
    if verifier is None:
        raise InvalidInput(
            'mode="speculative" needs a causal model that checks the drafts, and this network '
            f"({backbone.family}) has no causal mode, nor a folder {FOLDER}/ beside it: give verifier=, a causal model "
            "of the same tokens, or its folder."
        )
    if isinstance(verifier, str | os.PathLike):
        checker = _loaded(str(verifier), backbone.device, backbone.dtype)
    elif isinstance(network := getattr(verifier, "backbone", verifier), Backbone):
        checker = CausalModel(network, getattr(verifier, "tokenizer", None), network.max_length)
    elif callable(verifier) and hasattr(getattr(verifier, "config", None), "vocab_size"):
        checker = CausalModel(verifier, None, getattr(verifier.config, "max_position_embeddings", None))
    else:
        raise InvalidInput(f"verifier must be a causal model, or the folder or hub id of one, found {shown(verifier)}.")
    if isinstance(checker.network, Backbone):
        check_causal(checker.network, "the verifier")
    assert model.mask_id is not None
    own = backbone.vocab_size, model.mask_id, model.tokenizer
    check_same_tokens(checker.vocab_size, checker.tokenizer, *own)
    return checker


@lru_cache(maxsize=2)
def _loaded(source: str, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """A verifier, kept for the next run, as every request to a server is one."""
    return load_causal(source, device, dtype)


def check_options(options: Options) -> None:
    """Raise InvalidInput for options that would not leave the text the verifier's, or that no draft heeds."""
    refused = {
        "constraint": options.constraint is not None,
        "hooks": bool(options.hooks),
        "cfg_scale": options.cfg_scale > 0,
        "editing_threshold": options.editing_threshold is not None,
        "sampler": options.sampler == "latent",
        "remasking": options.remasking not in (DEFAULTS.remasking, "left_to_right"),
        "gen_length": options.gen_length == 0,
        **{name: name not in options.unset for name in options.commit_rule},
    }
    for name in (name for name, wrong in refused.items() if wrong):
        value = getattr(options, name)
        raise InvalidInput(
            f'{name}={shown(value)} does not go with mode="speculative", which writes what its verifier would write '
            "from left to right: drop one."
        )
