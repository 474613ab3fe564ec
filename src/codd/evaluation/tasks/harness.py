"""codd models for EleutherAI's lm-eval, unpatched; ``import codd.evaluation.tasks.harness`` registers "codd"."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from codd.backbones.quantized import Quantization
from codd.decoding import Model, Options, load
from codd.decoding.prompts import can_chat
from codd.errors import MissingDependency
from codd.evaluation.runs import Log
from codd.evaluation.tasks.answering import Advance, Answerer, Line, Request
from codd.evaluation.tasks.joint import Stretch
from codd.training.workers import Workers

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingDependency(f"evaluation needs the lm-eval harness: pip install codd[eval] ({error})") from error


@register_model("codd")
class CoddLM(LM):  # type: ignore[misc] # lm-eval has no types
    """A model with its circuit as the harness sees it.

    ``pretrained``: what `codd.load` takes, or a loaded model. All that is not named here is an option of the loop.
    Answers end at end-of-text; ``stop=False`` keeps what a model writes after it, as the published implementation does.
    """

    def __init__(
        self,
        pretrained: str | Model | None = None,
        circuit: str | None = "trained",
        batch_size: int | str | None = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        seed: int = 0,
        quantize: Quantization | None = None,
        *,
        log: Log | None = None,
        group: Workers | None = None,
        advance: Advance = lambda count: None,
        closed: bool = False,
        **options: Any,
    ):
        """Load what is not loaded yet; arguments may come as text, from ``lm_eval --model_args``."""
        super().__init__()
        if not isinstance(pretrained, Model):
            kind = None if dtype is None else getattr(torch, dtype)
            own = None if circuit == "none" else circuit
            pretrained = load(pretrained, own, device=device, dtype=kind, quantize=quantize)
        self.model, self.options = pretrained, Options.of(**options)
        self._answerer = Answerer(
            pretrained,
            self.options,
            seed=seed,
            batch=int(batch_size or 8),
            log=log,
            advance=advance,
            closed=closed,
        )
        self.tokenizer = self._answerer.tokenizer
        self._group, self._device = group, pretrained.backbone.device
        self._rank, self._world_size = (group.rank, group.count) if group else (0, 1)
        self.costs: dict[str, Line] = {}
        """Of every answer what it cost, by `request_key`."""

    @property
    def tokenizer_name(self) -> str:
        """For the harness's own cache of requests."""
        return hashlib.sha256(repr(self.tokenizer.chat_template).encode()).hexdigest()[:16]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """For the record."""
        return self.tokenizer.chat_template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text; an answer that was begun (``gen_prefix``) is left open."""
        if add_generation_prompt:
            return self.tokenizer.render_chat(chat_history)
        *before, begun = chat_history
        return self.tokenizer.render_chat(before) + begun["content"]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """An answer to each."""
        asked = [request_of(request) for request in requests]
        found = self._answerer.answers(asked)
        self.costs |= found
        return [str(found[request.key]["text"]) for request in asked]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of a continuation given a context, under the joint: see `codd.evaluation.tasks.joint`."""
        keys = [request_key(request) for request in requests]
        found = self._answerer.scores({key: self._stretch(*r.args) for key, r in zip(keys, requests, strict=True)})
        return [(float(found[key]["log_prob"]), bool(found[key]["greedy"])) for key in keys]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts; one that is longer than half the model is cut into pieces, each given as much before it."""
        half = max(1, (self.model.backbone.max_length or 2048) // 2)
        pieces = {}
        for request in requests:
            ids = self.tokenizer.encode(request.args[0])
            for i in range(0, len(ids), half):
                pieces[f"{request_key(request)}/{i}"] = Stretch(ids[max(0, i - half) : i], ids[i : i + half])
        totals = dict.fromkeys(map(request_key, requests), 0.0)
        for key, line in self._answerer.scores(pieces).items():
            totals[key.rpartition("/")[0]] += float(line["log_prob"])
        return [totals[request_key(request)] for request in requests]

    def _stretch(self, context: str, continuation: str) -> Stretch:
        """Encoded together, so that no token straddles the seam differently than in running text."""
        bare = context.rstrip()
        context, continuation = bare, context[len(bare) :] + continuation
        given, whole = self.tokenizer.encode(context), self.tokenizer.encode(context + continuation)
        if whole[: len(given)] != given:
            whole = given + self.tokenizer.encode(continuation)
        limit = self.model.backbone.max_length
        too_many = 0 if limit is None else max(0, len(whole) - limit)
        return Stretch(given[too_many:], whole[len(given) :])

    # What follows lets the harness divide the problems over processes.

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Of every process, in a row."""
        if self._world_size == 1:
            return tensor
        found = [torch.empty_like(tensor.reshape(-1)) for _ in range(self._world_size)]
        torch.distributed.all_gather(found, tensor.reshape(-1))
        return torch.cat(found)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Of every process, for one of them."""
        if self._world_size == 1:
            return [obj]
        found: list[Any] | None = [None] * self._world_size if self._rank == dst else None
        torch.distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        """Until all are here."""
        if self._group:
            self._group.wait()


def request_key(request: Instance) -> str:
    """What names a request within a cell: the problem, which of its requests, and a check of the words."""
    digest = hashlib.sha256(repr(request.args).encode()).hexdigest()[:12]
    return f"{request.task_name}/{request.doc_id}/{request.idx}/{digest}"


def request_of(request: Instance) -> Request:
    """What the harness asks, without the harness."""
    prompt, arguments = request.args
    until = arguments.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    return Request(request_key(request), int(request.doc_id or 0), request.idx, prompt, stops)


def chats(model: Model) -> bool:
    """Whether the model was taught to converse."""
    return model.tokenizer is not None and can_chat(model.tokenizer)
