"""A backbone, its circuit and its tokenizer under one name: load, generate, denoise."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones import Backbone, Tokenizer, load_checkpoint
from codd.backbones.loading import DTYPES, as_dtype, check_dtype
from codd.backbones.progress import lasting_bar
from codd.backbones.quantized import Quantization
from codd.circuits import HMM, load_circuit
from codd.circuits.protocol import ProbabilisticCircuit
from codd.constraints import Automaton, Vocabulary
from codd.constraints.determinism import MAX_STATES
from codd.constraints.forms import Form
from codd.constraints.languages import Language
from codd.decoding import speculative
from codd.decoding.decisions import Decider, Decision, check_room, decision
from codd.decoding.loop import denoise
from codd.decoding.options import Constraint, Keywords, Options
from codd.decoding.prompts import Prompt, Prompts, check_masks, encode_prompts
from codd.decoding.runner import runner_for
from codd.decoding.sequence import SequenceState, Step, StopCondition, first_stop, start_sequences
from codd.distributed import choose_device
from codd.errors import InvalidInput, shown

CIRCUIT_FOLDERS = {"trained": "circuit", "static": "circuit-static"}
"""Where a checkpoint keeps the circuits that belong to it: its best one, and the best that no network modulates."""
TURN_ENDS = ("<|eot_id|>", "<|im_end|>")
"""What instructed models write at the end of an answer, beside their end-of-text."""

CircuitSource = str | os.PathLike[str] | ProbabilisticCircuit | Literal["trained", "static", "null"] | None
"""How a circuit is named: see `load`."""


@dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """What `Model.generate` gives: lists with an entry for each prompt."""

    texts: list[str] | None
    """The continuation; where the prompt had masks, the whole text. None if the model has no tokenizer."""
    sequences: list[Int[Tensor, "..."]]
    """Ids of prompt and continuation, up to and including the end-of-text."""
    prompt_lengths: list[int]
    """The number of tokens of each prompt."""
    steps: list[int]
    """The number of network evaluations of each sequence."""
    circuit_steps: list[int]
    """In how many of them the circuit acted."""
    positions: list[Int[Tensor, "..."]]
    """Where tokens were written, ascending: the continuation, and the masks of the prompt if it had any."""
    scores: list[Float[Tensor, "..."]]
    """The probability of each written token under the distribution that it was taken from, in the same order."""
    finish_reasons: list[Literal["stop", "length"]]
    """"stop": at an end-of-text, a stop string, or complete under its constraint; "length": all masks are filled."""

    def __repr__(self) -> str:
        """One line per prompt: the text, cut short, and what it took."""
        lines = [f"Generation of {len(self.steps)} prompt{'s' * (len(self.steps) != 1)}:"]
        for number, ids in enumerate(self.completions):
            text = shown(ids.tolist() if self.texts is None else self.texts[number])
            calls = f"{self.steps[number]} network calls, the circuit in {self.circuit_steps[number]}"
            written = f"{len(self.positions[number])} tokens written, finish reason {self.finish_reasons[number]}"
            lines.append(f"  {number}: {text} ({written}, {calls})")
        return "\n".join(lines)

    @property
    def completions(self) -> list[Int[Tensor, "..."]]:
        """The sequences without their prompts."""
        return [ids[length:] for ids, length in zip(self.sequences, self.prompt_lengths, strict=True)]


@dataclass(frozen=True)
class Model:
    """A denoiser with its circuit and tokenizer; made by `load`."""

    backbone: Backbone
    circuit: ProbabilisticCircuit | None
    tokenizer: Tokenizer | None
    """None where the checkpoint has none: give ids then."""
    mask_id: int | None
    folder: Path | None = None
    """The folder that it was loaded from; None: it was made in memory."""

    def with_circuit(self, circuit: CircuitSource) -> "Model":
        """The same network with another circuit; the weights are shared.

        Args:
            circuit: A folder, a hub id, a circuit, "trained", "static", "null" or None, as for `load`.

        Raises:
            InvalidInput: There is no such circuit, or it does not fit the network.
        """
        return replace(self, circuit=_resolve_circuit(circuit, self.backbone, self.folder))

    def to(self, *places: torch.device | torch.dtype | str, dtype: torch.dtype | str | None = None) -> "Model":
        """Move the network (in place, as PyTorch does) and the circuit to a device; convert the network to a type.

        Args:
            places: A device, a floating-point type, or both; or their names.
            dtype: The type, where it is not among ``places``.

        Returns:
            The model itself.

        Raises:
            InvalidInput: A device that this machine lacks, a type that it cannot compute in, or int8 weights.
        """
        device = self.backbone.device
        for place in places:
            if isinstance(place, torch.dtype) or place in DTYPES:
                dtype = place
            else:
                device = choose_device(place)
        floating = self.backbone.dtype if dtype is None else as_dtype(dtype)
        check_dtype(floating, device)
        self.backbone.to(device, floating)
        if self.circuit is not None:
            object.__setattr__(self, "circuit", self.circuit.to(device=device))
        return self

    @property
    def known_mask(self) -> int:
        """``mask_id``; InvalidInput if neither the checkpoint nor its caller gave it."""
        if self.mask_id is None:
            raise InvalidInput("this checkpoint does not say which token is the mask: codd.load(..., mask_id=...).")
        return self.mask_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer: end-of-text and ends of a turn."""
        ids = {self.backbone.special.eos, *self.backbone.spec.stop_ids}
        if self.tokenizer is not None:
            ids |= {self.tokenizer.eos_id, *map(self.tokenizer.token_to_id, TURN_ENDS)}
        return frozenset(token for token in ids if token is not None)

    def encode(self, prompts: Prompts, *, gen_length: int = 128, chat: bool | None = None) -> list[list[int]]:
        """The ids that `generate` makes of its prompts."""
        return encode_prompts(prompts, self.tokenizer, chat=chat, whole=gen_length == 0)

    def generate(
        self,
        prompts: Prompts,
        options: Options | None = None,
        *,
        chat: bool | None = None,
        progress: bool | None = None,
        **overrides: Unpack[Keywords],
    ) -> Generation:
        """Answer prompts.

        Args:
            prompts: A text, a list of texts, of id lists, or of conversations (lists of messages). Masks in a prompt
                are filled first.
            options: How; see `Options`.
            chat: Whether a text is put into the model's chat template; None: if it has one, unless the text has masks
                to be filled.
            progress: Whether a progress bar is shown on stderr; None: for several prompts that take longer than two
                seconds, if stderr is a terminal.
            overrides: Options by name, which take the place of those in ``options``.

        Returns:
            Texts, ids, network calls and probabilities, with an entry for each prompt.

        Raises:
            InvalidInput: Prompts or options that cannot be used.
        """
        chosen = _options(options, overrides)
        sequences = self._started(prompts, chosen, chat)
        prompt_ids = [state.ids[: state.prompt_length].tolist() for state in sequences]
        scores = [torch.zeros(len(state.ids)) for state in sequences]
        circuit_steps = [0] * len(sequences)
        steps = denoise(runner_for(self.backbone, sequences), sequences)
        if progress or (progress is None and len(sequences) > 1):
            steps = _with_bar(steps, sequences, always=bool(progress))
        for step in steps:
            scores[step.sequence][step.positions] = step.scores
            scores[step.sequence][step.edits.positions] = step.edits.scores
            circuit_steps[step.sequence] += step.circuit
        written = [(~state.given[: len(state.ids)] & ~state.masked).nonzero()[:, 0] for state in sequences]
        texts = None
        if self.tokenizer is not None:
            texts = [
                self.text(state.ids, prompt, chosen.stop_strings)
                for state, prompt in zip(sequences, prompt_ids, strict=True)
            ]
        return Generation(
            texts=texts,
            sequences=[state.ids for state in sequences],
            prompt_lengths=[state.prompt_length for state in sequences],
            steps=[state.evaluations for state in sequences],
            circuit_steps=circuit_steps,
            positions=written,
            scores=[row[where] for row, where in zip(scores, written, strict=True)],
            finish_reasons=["stop" if state.stopped else "length" for state in sequences],
        )

    def denoise(
        self,
        prompts: Prompts,
        options: Options | None = None,
        *,
        chat: bool | None = None,
        **overrides: Unpack[Keywords],
    ) -> Iterator[Step]:
        """The run of `generate` as a stream of steps.

        Args:
            prompts: As for `generate`.
            options: As for `generate`.
            chat: As for `generate`.
            overrides: As for `generate`.

        Returns:
            Each step is one network evaluation for one prompt; ``step.sequence`` says for which.

        Raises:
            InvalidInput: Prompts or options that cannot be used.
        """
        sequences = self._started(prompts, _options(options, overrides), chat)
        return denoise(runner_for(self.backbone, sequences), sequences)

    def decide(
        self,
        prompt: Prompt,
        fields: Mapping[str, Language],
        *,
        template: str | None = None,
        top: int = 100,
        chat: bool | None = None,
    ) -> Decision:
        """The exact joint distribution of several fields behind a prompt, from one network call.

        >>> model.decide("...", {"urgent": Choice(["yes", "no"]), "score": Regex("[1-5]")}).best  # doctest: +SKIP
        {'urgent': 'yes', 'score': '4'}

        Args:
            prompt: A text, ids or a conversation, without masks.
            fields: What each field may be: a `Choice`, or a `Regex` or `JsonSchema` that has few texts.
            template: The text that is filled in, with each field's name once in braces; None: a line ``name: value``
                per field. The network sees the fixed text as far as its place is the same for all values.
            top: How many assignments are listed at most.
            chat: As for `generate`.

        Returns:
            The joint distribution, its marginals, and the most probable assignment.

        Raises:
            InvalidConstraint: Fields that tokens cannot write or one block does not hold, with too many values, or of
                which too many assignments are equally probable.
            InvalidInput: A prompt that cannot be used.
        """
        form = Form(fields, template)
        return decision(self.decider(prompt, form, chat=chat)(), form.values, list(fields), top)

    def decider(
        self, prompt: Prompt, form: Form, *, chat: bool | None = None, max_states: int = MAX_STATES
    ) -> Callable[[], Decider]:
        """What makes the network call of `decide`: for those who choose where that is done."""
        pad = self.backbone.special.pad
        pads = () if pad is None else (pad,)
        compiled = form.compile(self.vocabulary, sorted(self.stop_ids), pads, max_states=max_states)
        [ids] = encode_prompts([prompt], self.tokenizer, chat=chat)
        check_room(self.backbone, self.circuit, compiled, ids, self.known_mask)
        return partial(Decider, self.backbone, self.circuit, compiled, ids, self.known_mask)

    def _started(self, prompts: Prompts, options: Options, chat: bool | None) -> list[SequenceState]:
        """The sequences of a run; says what is missing where a prompt has no mask to fill."""
        ids = self.encode(prompts, gen_length=options.gen_length, chat=chat)
        if options.gen_length == 0 and self.mask_id is not None:
            check_masks(prompts, ids, self.tokenizer, self.mask_id)
        return self.start(ids, options)

    def start(self, ids: Sequence[Sequence[int]], options: Options) -> list[SequenceState]:
        """The sequences of a run before their first step, checked: for those who take the steps themselves."""
        if options.stop_strings and self.tokenizer is None:
            raise InvalidInput("this checkpoint has no tokenizer, so that it cannot stop at a text: give stop=True.")
        decode = self.tokenizer.decode if self.tokenizer is not None and options.stop_strings else None
        stop = StopCondition(self.stop_ids, options.stop_strings, decode)
        sequences = start_sequences(
            self.backbone,
            ids,
            options,
            mask_id=self.known_mask,
            circuit=self.circuit,
            stop=stop,
            automaton=None if options.constraint is None else self.automaton(options.constraint),
        )
        if options.mode == "speculative" and not options.published:
            speculative.begin(self, sequences, options.verifier)
        return sequences

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes that each token writes; InvalidInput if the model has no tokenizer."""
        if self.tokenizer is None:
            raise InvalidInput("this checkpoint has no tokenizer: of constraints it knows Automaton alone.")
        return Vocabulary.of(self.tokenizer, self.backbone.vocab_size)

    def automaton(self, constraint: Constraint) -> Automaton:
        """A constraint over the model's tokens; its texts may end with any of `stop_ids`, and padding after them.

        An `Automaton` is taken as it is, but for that. Raises InvalidConstraint where it is too large, or has no texts.
        """
        if isinstance(constraint, Automaton) and constraint.vocab_size != self.backbone.vocab_size:
            raise InvalidInput(
                f"the automaton is over {constraint.vocab_size} tokens, the model over {self.backbone.vocab_size}."
            )
        automaton = constraint if isinstance(constraint, Automaton) else constraint.compile(self.vocabulary)
        pad = self.backbone.special.pad
        return automaton.with_end(self.stop_ids, () if pad is None else (pad,)) if self.stop_ids else automaton

    def text(self, sequence: Int[Tensor, " L"], prompt: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The continuation of a prompt, cut before the first stop string; if the prompt had masks, the whole text."""
        assert self.tokenizer is not None
        if self.mask_id in prompt:
            return self.tokenizer.decode(sequence)
        text = self.tokenizer.decode(sequence[len(prompt) :])
        return text[: first_stop(text, stops)]


def _with_bar(steps: Iterator[Step], sequences: Sequence[SequenceState], *, always: bool) -> Iterator[Step]:
    """The same steps, with a bar over the tokens that are written; what a sequence does not need counts at its end."""
    left = [int(state.masked.sum()) for state in sequences]
    with lasting_bar(f"{len(sequences)} prompt{'s' * (len(sequences) != 1)}", sum(left), always=always) as advance:
        for step in steps:
            done = left[step.sequence] if step.finished else len(step.positions)
            left[step.sequence] -= done
            advance(done)
            yield step


def _options(options: Options | None, overrides: Keywords) -> Options:
    """The options of an object with keywords on top; InvalidInput if it is no `Options`."""
    if options is None:
        return Options.of(**overrides)
    if not isinstance(options, Options):
        raise InvalidInput(f"options must be a codd.Options, found {type(options).__name__}; give others by name.")
    return options.changed(**overrides) if overrides else options


def load(
    source: str | os.PathLike[str] | None = None,
    circuit: CircuitSource = "trained",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    block_size: int | None = None,
    mask_id: int | None = None,
    check: bool = True,
    adapter: str | os.PathLike[str] | None = None,
    merge: bool = True,
    quantize: Quantization | None = None,
) -> Model:
    """Load a checkpoint of any known family with its circuit; without ``source``, the bundled model.

    Args:
        source: A folder or a hub id.
        circuit: A folder, a hub id or a circuit; "trained": the one in the checkpoint's own folder (circuit/), if any;
            "static": the one beside it without a head (circuit-static/); "null": the control, which changes nothing;
            None: no circuit.
        device: A device or its name; by default a GPU if there is one.
        dtype: A dtype or its name; by default float32 on a CPU.
        revision: The branch, tag or commit of a hub repository.
        block_size: The block length of a block-causal network whose files do not give it, or another one.
        mask_id: The id of the mask token, for checkpoints whose files do not give it, or another one.
        check: Refuse weights with NaN, and files that do not match the sha256 beside them; False saves the time.
        adapter: A PEFT LoRA checkpoint (folder or hub id).
        merge: Merge the adapter into the weights; False keeps it apart, on at first:
            ``model.backbone.switch_adapter(False)`` switches it off.
        quantize: "int8": 8-bit weights in the network's layers and head: less time and memory, at slightly less
            precision.

    Raises:
        FormatError: Files that are damaged, or of no known family.
        InvalidInput: Arguments that do not fit the checkpoint.
    """
    backbone, tokenizer, folder = load_checkpoint(
        source,
        device=device,
        dtype=dtype,
        revision=revision,
        block_size=block_size,
        check=check,
        adapter=adapter,
        merge=merge,
        quantize=quantize,
    )
    if mask_id is None:
        mask_id = backbone.special.mask
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_id
    if mask_id is not None and not 0 <= mask_id < backbone.vocab_size:
        raise InvalidInput(f"mask_id {mask_id} is not one of the {backbone.vocab_size} tokens of the model.")
    return Model(backbone, _resolve_circuit(circuit, backbone, folder, check), tokenizer, mask_id, folder)


def _resolve_circuit(
    source: CircuitSource, backbone: Backbone, folder: Path | None, check: bool = True
) -> ProbabilisticCircuit | None:
    if source is None or (source == "trained" and not (folder and (folder / CIRCUIT_FOLDERS["trained"]).is_dir())):
        return None
    circuit: ProbabilisticCircuit
    if source == "null":
        circuit = HMM.neutral(num_states=1, vocab_size=backbone.vocab_size)
    elif isinstance(source, str | os.PathLike):
        folder_or_id = _own_circuit(str(source), folder) if source in CIRCUIT_FOLDERS else source
        circuit = load_circuit(folder_or_id, check=check)
    elif hasattr(source, "condition_on"):
        circuit = source
    else:
        raise InvalidInput(f"circuit must be a folder, a hub id, a circuit or None, found {shown(source)}.")
    _check_fits(circuit, backbone)
    return circuit.to(device=backbone.device)


def _own_circuit(name: str, folder: Path | None) -> Path:
    """The folder of one of a checkpoint's own circuits."""
    if folder is None:
        raise InvalidInput(f"this model was not loaded from a folder, so that there is no circuit {name!r} beside it.")
    own = folder / CIRCUIT_FOLDERS[name]
    if not own.is_dir():
        raise InvalidInput(
            f"{folder}: has no folder {own.name}/, so that there is no circuit {name!r}; give the folder of another, "
            '"trained", "null" or None.'
        )
    return own


def _check_fits(circuit: ProbabilisticCircuit, backbone: Backbone) -> None:
    if circuit.vocab_size != backbone.vocab_size:
        raise InvalidInput(
            f"the circuit is over {circuit.vocab_size} tokens, the model over {backbone.vocab_size}: they do not "
            "belong together."
        )
    width = backbone.config.width
    if circuit.feature_width not in (None, width):
        raise InvalidInput(
            f"the circuit is conditioned on hidden states of {circuit.feature_width} numbers, those of the model have "
            f"{width}: they do not belong together."
        )
