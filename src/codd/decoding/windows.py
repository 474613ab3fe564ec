"""Where the circuit looks in full mode: a window of fixed length over the tokens that are due."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def best_window(due: Bool[Tensor, "*B L"], length: int) -> Int[Tensor, "*B"]:
    """The beginning of a window that covers as many due positions as any.

    Of the windows that do, those that begin in a row with the first of them are equally good; the middle one leaves
    the same context on both sides.
    """
    length = min(length, due.shape[-1])
    total = torch.nn.functional.pad(due.long().cumsum(-1), (1, 0))
    covered = total[..., length:] - total[..., : total.shape[-1] - length]
    best = covered == covered.amax(-1, keepdim=True)
    begin = torch.arange(best.shape[-1], device=due.device)
    first = best.int().argmax(-1)
    beyond = ~best & (begin > first[..., None])
    last = torch.where(beyond.any(-1), beyond.int().argmax(-1), best.shape[-1]) - 1
    return (first + last) // 2


def reference_window(due: Bool[Tensor, " L"], length: int) -> tuple[int, int]:
    """As the reference chooses: centred on a due position (moved inside at the ends), the first that covers most.

    Returns the beginning and the number of due positions covered; (0, 0) if nothing is due.
    """
    total = len(due)
    begin, most = 0, 0
    for place in due.nonzero()[:, 0].tolist():
        at = max(0, min(place - length // 2, total - length))
        covered = int(due[at : at + length].sum())
        if covered > most:
            begin, most = at, covered
    return begin, most
