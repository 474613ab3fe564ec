"""codd models for EleutherAI's lm-eval, unpatched. It finds models by import, so that its command line is started here:

    python -m codd.evaluation.harness --model codd --model_args circuit=null --tasks gsm8k --limit 50

In Python, ``import codd.evaluation.harness`` registers "codd" for `lm_eval.simple_evaluate`.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from codd.backbones.quantized import Quantization
from codd.decoding import Model, Options, load
from codd.distributed import DistributedContext
from codd.errors import MissingDependency
from codd.evaluation.answering import Answerer, Line, Request
from codd.evaluation.continuations import ScoringRequest

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingDependency(f"evaluation needs the lm-eval harness: pip install 'codd-lm[eval]' ({error})") from error


@register_model("codd")
class CoddLM(LM):  # type: ignore[misc] # lm-eval has no types
    """A model with its circuit, as a model of the harness.

    ``pretrained`` is what `codd.load` takes, or a loaded model. All other keywords are decoding options.
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
        context: DistributedContext | None = None,
        answerer: Answerer | None = None,
        **options: Any,
    ):
        """Load the model if it is not loaded; arguments may be text, from ``lm_eval --model_args``.

        ``answerer`` brings model and options itself.
        """
        super().__init__()
        if answerer is None and not isinstance(pretrained, Model):
            kind = None if dtype is None else getattr(torch, dtype)
            own = None if circuit == "none" else circuit
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                device = None  # lm-eval's command line says cuda:0 where nobody said anything
            pretrained = load(pretrained, own, device=device, dtype=kind, quantize=quantize)
        if answerer is None:
            assert isinstance(pretrained, Model)
            batch = 8 if batch_size in (None, "auto") else int(batch_size)
            answerer = Answerer(pretrained, Options.of(**options), seed=seed, batch=batch)
        self._answerer, self.model, self.options = answerer, answerer.model, answerer.options
        self.tokenizer = answerer.tokenizer
        self._context, self._device = context, self.model.backbone.device
        self._rank, self._world_size = (context.rank, context.world_size) if context else (0, 1)
        self.costs: dict[str, Line] = {}
        """The log line of every answer, by `request_key`: text, tokens, calls, seconds, seed."""

    @property
    def tokenizer_name(self) -> str:
        """A name of the chat template, for the harness's own cache of requests."""
        return hashlib.sha256(repr(self.tokenizer.chat_template).encode()).hexdigest()[:16]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template, for the harness's record of the run."""
        return self.tokenizer.chat_template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text; an answer that was begun (``gen_prefix``) is left open.

        Space around the beginning of an answer is the template's to keep or to trim: LLaDA's and ours trim it.
        """
        rendered = self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return rendered
        begun = chat_history[-1]["content"].lstrip()
        start = rendered.rindex(begun.rstrip())
        return rendered[: start + len(begun if rendered.startswith(begun, start) else begun.rstrip())]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each request."""
        plain = [request_of(request) for request in requests]
        answers = self._answerer.answers(plain)
        self.costs |= answers
        return [str(answers[request.key]["text"]) for request in plain]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability (nats) of continuations under the joint, and whether they are greedy: see `tasks.joint`."""
        keys = [request_key(request) for request in requests]
        asked = {key: self._scoring_request(*r.args) for key, r in zip(keys, requests, strict=True)}
        scores = self._answerer.scores(asked)
        return [(float(scores[key]["log_prob"]), bool(scores[key]["greedy"])) for key in keys]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability (nats) of whole texts, in pieces of half the model's length, each given the one before."""
        half = max(1, (self.model.backbone.max_length or 2048) // 2)
        pieces = {}
        for request in requests:
            ids = self.tokenizer.encode(request.args[0])
            for i in range(0, len(ids), half):
                pieces[f"{request_key(request)}/{i}"] = ScoringRequest(ids[max(0, i - half) : i], ids[i : i + half])
        totals = dict.fromkeys(map(request_key, requests), 0.0)
        for key, line in self._answerer.scores(pieces).items():
            totals[key.rpartition("/")[0]] += float(line["log_prob"])
        return [totals[request_key(request)] for request in requests]

    def _scoring_request(self, context: str, continuation: str) -> ScoringRequest:
        """Context and continuation encoded as one text, so that tokens at the seam are those of running text."""
        bare = context.rstrip()
        context, continuation = bare, context[len(bare) :] + continuation
        given, whole = self.tokenizer.encode(context), self.tokenizer.encode(context + continuation)
        if whole[: len(given)] != given:
            whole = given + self.tokenizer.encode(continuation)
        limit = self.model.backbone.max_length
        too_many = 0 if limit is None else max(0, len(whole) - limit)
        return ScoringRequest(given[too_many:], whole[len(given) :])

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, one after the other; the harness asks for it."""
        if self._world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor.reshape(-1)) for _ in range(self._world_size)]
        torch.distributed.all_gather(parts, tensor.reshape(-1))
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes on process ``dst``, None on the others."""
        if self._world_size == 1:
            return [obj]
        objects: list[Any] | None = [None] * self._world_size if self._rank == dst else None
        torch.distributed.gather_object(obj, objects, dst=dst)
        return objects

    def barrier(self) -> None:
        """Wait for all processes."""
        if self._context:
            self._context.barrier()


def request_key(request: Instance) -> str:
    """The name of a request within a configuration: task, problem, number, and a digest of the prompt."""
    digest = hashlib.sha256(repr(request.args).encode()).hexdigest()[:12]
    return f"{request.task_name}/{request.doc_id}/{request.idx}/{digest}"


def request_of(request: Instance) -> Request:
    """A request of the harness as one of ours."""
    prompt, arguments = request.args
    until = arguments.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    return Request(request_key(request), int(request.doc_id or 0), request.idx, prompt, stops)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
