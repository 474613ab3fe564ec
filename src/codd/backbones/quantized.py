"""Linear layers with int8 weights: one scale a row of the matrix, rounded once, when a model is loaded.

On a CPU the input is rounded to 8 bits as well, each of its rows by its own largest value, so that products are of
whole numbers (oneDNN) and a row's result depends on no other row. On a GPU the input keeps its precision: a product
with few rows takes as long as its weights take to be read, and those are half as many bytes.
"""

import functools
import platform
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn

from codd.backbones.kernels import kernels_for
from codd.errors import InvalidInput

if TYPE_CHECKING:
    from codd.backbones.transformer import Transformer

Quantization = Literal["int8"]
ZERO = 128
"""The byte that stands for 0 in a rounded input: oneDNN's fast products are of unsigned bytes and signed weights."""


def round_rows(weight: Float[Tensor, "o i"]) -> tuple[Int8[Tensor, "o i"], Float[Tensor, " o"]]:
    """Whole numbers from -127 to 127, and what each row of them is multiplied with, in float32."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale[:, None]).round().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer with int8 weights; for inference, on the device that it was made on."""

    def __init__(self, weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None = None, digits: int = 1):
        """Round a layer's weights; the bias stays as it is. ``digits``: bytes of an input on a CPU, 1 or 2.

        Raises InvalidInput for a CPU that has no such products.
        """
        super().__init__()
        self.digits = digits
        whole, scale = round_rows(weight)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        if weight.device.type == "cpu":
            check_cpu()
            self.packed = torch.ops.onednn.qlinear_prepack(whole, None)
            self.zeros = torch.zeros(len(scale), dtype=torch.long)
        else:
            self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x: Float[Tensor, "*b i"], onto: Float[Tensor, "*b o"] | None = None) -> Float[Tensor, "*b o"]:
        """The layer's output, added to ``onto``, which may be overwritten."""
        if x.device.type == "cpu":
            return self._rounded(x, onto)
        if (kernels := kernels_for(x)) is not None and kernels.multiplies_int8(x):
            summed: Tensor = kernels.int8_product(x, self.weight, self.scale, self.bias, onto)
            return summed
        wide = torch.mul(self.weight, self.scale[:, None], out=x.new_empty(self.weight.shape))
        out = F.linear(x, wide, self.bias)
        return out if onto is None else onto + out

    def _rounded(self, x: Float[Tensor, "*b i"], onto: Float[Tensor, "*b o"] | None) -> Float[Tensor, "*b o"]:
        largest, rows = input_range(), x.reshape(-1, x.shape[-1]).float()
        top = rows.abs().amax(-1, keepdim=True)
        # A row of zeros becomes any bytes here, and zeros again when it is multiplied with its largest value.
        half, scale = torch.tensor(ZERO + 0.5), largest / top
        whole = torch.addcmul(half, rows, scale).to(torch.uint8)
        if self.digits == 2:  # what rounding left, as further rows
            rest = torch.addcmul(ZERO - whole.float(), rows, scale)
            whole = torch.cat((whole, rest.mul_(2 * largest).add_(half).to(torch.uint8)))
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1 / largest, ZERO, self.packed, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if self.digits == 2:
            out = out[: len(top)].add_(out[len(top) :], alpha=1 / (2 * largest))
        out = out.mul_(top) if self.bias is None else torch.addcmul(self.bias.float(), out, top)
        out = out.to(x.dtype).view(*x.shape[:-1], len(self.scale))
        return out if onto is None else onto + out


def check_cpu() -> None:
    """Raise InvalidInput where a CPU's int8 products are missing, or slower than those of float32."""
    served: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not served or platform.machine().lower() not in ("x86_64", "amd64"):
        raise InvalidInput(
            f'quantize="int8" on a CPU needs oneDNN on an x86-64 processor; this is {platform.machine()}. Load the '
            "model without it."
        )


@functools.cache
def input_range() -> int:
    """The largest value of a rounded input. Without VNNI a CPU adds pairs of products in 16 bits: half of the range."""
    return 127 if torch.cpu._is_vnni_supported() else 63


def check(quantize: str | None, *, merge: bool = True) -> None:
    """Raise InvalidInput for a kind of quantization that there is not, or that cannot be had without ``merge``."""
    if quantize not in (None, "int8"):
        raise InvalidInput(f'quantize must be "int8" or None, found {quantize!r:.100}.')
    if quantize is not None and not merge:
        raise InvalidInput("merge=False adds an adapter to weights that quantize would round: give merge=True, or one.")


def quantize(network: "Transformer") -> None:
    """Put int8 layers in place of a network's projections and of its head.

    Embedding, norms and what a noise level passes stay; of a tied head the embedding is rounded into a copy. Raises
    InvalidInput for a mixture of experts.
    """
    if network.config.experts is not None:
        raise InvalidInput('quantize="int8" is for networks without experts: load this one without it.')
    for name, layer in list(network.blocks.named_modules()):
        if isinstance(layer, nn.Linear) and not name.endswith("modulation"):
            # Gated inputs have few large values: with one byte they are three quarters of the network's divergence.
            digits = 2 if name.endswith("mlp.down") else 1
            network.blocks.set_submodule(name, Int8Linear(layer.weight, layer.bias, digits))
    head = network.head
    head.int8 = Int8Linear(network.embedding.tokens.weight if head.weight is None else head.weight, head.bias)
    head.weight = head.bias = None
