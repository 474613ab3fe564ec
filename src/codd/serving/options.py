"""The fields of a request that say how masks become text: those of `codd.decoding.Options`, by the same names."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from codd.decoding.options import Mode, Options, Order, Outside, Sampler, Tempering
from codd.errors import InvalidInput
from codd.serving.errors import bad_request

LARGEST = 2**31 - 1
"""No count of tokens or steps, and no id, is larger: beyond it kernels would overflow instead of complaining."""

Count = Annotated[int, Field(ge=1, le=LARGEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
"""One wrong id is reported, not a hundred thousand."""
AnyOrder = Literal[Order, "maskgit_plus", "topk_margin", "topprob", "origin"]
"""Orders, other people's names for them, and those of the reference."""


class Strict(BaseModel):
    """A part of a request: an unknown field is an error that names it, and "3" is not 3."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Chosen(Strict):
    """Fields that are options of the loop, wherever their names say so.

    A field that is absent is the server's to choose. So is null, except for options that can be None themselves
    (threshold, steps, top_p ...): there it is said explicitly.
    """

    def given(self) -> dict[str, Any]:
        """The options that the client chose."""
        names = {field.name for field in fields(Options)} & self.model_fields_set
        said = {name: getattr(self, name) for name in names}
        return {name: value for name, value in said.items() if value is not None or name in NULLABLE}

    def options(self, defaults: Options, **changes: Any) -> Options:
        """What the client chose, over what the server does by default; ``changes`` are worked out from both."""
        chosen = {**self.given(), **changes}
        for one, other in (("threshold", "entropy_budget"), ("entropy_budget", "threshold")):
            if chosen.get(one) is not None:  # they exclude each other, and the client comes first
                chosen.setdefault(other, None)
        try:
            return defaults.changed(**chosen)
        except InvalidInput as error:
            raise bad_request(error) from None


NULLABLE = {"steps", "top_p", "top_k", "activation", "threshold", "entropy_budget", "preset"}
"""Options for which None means something."""


class Sampling(Chosen):
    """All options but ``hooks``, which are code, and ``stop``, which OpenAI's requests use for texts as well."""

    gen_length: Annotated[int, Field(ge=0, le=LARGEST)] | None = Field(
        None, description="Masks put after the prompt; 0: only those in the prompt are filled."
    )
    block_length: Count | None = Field(None, description="Tokens of a block.")
    steps: Count | None = Field(None, description="Evaluations of the network; null: one for each token.")
    mode: Mode | None = Field(None, description="Block after block, or everything at once.")
    remasking: AnyOrder | None = Field(None, description="Which tokens come first.")
    sampler: Sampler | None = Field(None, description="How the circuit is used; factorized: not at all.")
    temperature: NotNegative | None = Field(None, description="Of the tokens; 0 takes the most probable one.")
    top_p: Share | None = Field(None, description="Draw from the smallest set of tokens that is more probable.")
    top_k: Count | None = Field(None, description="Draw from so many of the most probable tokens.")
    cfg_scale: NotNegative | None = Field(None, description="Guidance by the prompt; 0 is none.")
    circuit_temperature: NotNegative | None = Field(
        None, description="Divides the logits before the product with the circuit."
    )
    tempering: Tempering | None = Field(None, description="Whether latents are drawn from tempered logits.")
    activation: NotNegative | None = Field(
        None, description="The circuit acts while fewer of its positions are masked; null: always."
    )
    outside: Outside | None = Field(None, description="Tokens that are due outside of the window, in full mode.")
    threshold: Share | None = Field(None, description="Commit all tokens at least so probable.")
    entropy_budget: NotNegative | None = Field(None, description="Commit tokens while entropies sum to less (nats).")
    sharpening: Annotated[float, Field(gt=0)] | None = Field(None, description="Of the order sharpened.")
    ban: Ids | None = Field(None, description="Ids that are never written.")
    preset: Literal["reference"] | None = Field(None, description="Follow the published implementation.")
    eps: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="The preset's last time in full mode.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="Fixes everything that is drawn; choice i of n uses seed + i."
    )
