"""Leaf values and what hangs on them as matrix products, in the circuit's own precision, on any device.

On the CPU only the rows that need an operation take part in it. On other devices choosing rows would wait for the
device, so all rows take part and the result is selected.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import embedding_bag

from codd.circuits.evidence import Evidence, Kind, tempered
from codd.circuits.ops import native
from codd.circuits.ops.scaled import LEAF_FLUSH, Scaled, exponentials
from codd.circuits.parameters import Emission


class Rows:
    """The positions of one kind: a list of them on the CPU, all rows with a mask elsewhere.

    Tensors are taken in the order of the batch; what is written may lie in memory in any order.
    """

    def __init__(self, mask: Bool[Tensor, "B L"]):
        """``mask`` marks the rows; on the CPU they are listed, elsewhere all are computed."""
        self.mask = mask
        self.listed = mask.device.type == "cpu"
        self.index = mask.nonzero(as_tuple=True) if self.listed else ()
        self.all = not self.listed or len(self.index[0]) == mask.numel()

    def __len__(self) -> int:
        """How many rows ``take`` gives."""
        return len(self.index[0]) if self.listed else self.mask.numel()

    def __bool__(self) -> bool:
        """Whether there are any (elsewhere than on the CPU: perhaps)."""
        return not self.listed or len(self.index[0]) > 0

    def take(self, x: Shaped[Tensor, "B L *K"]) -> Shaped[Tensor, "R *K"]:
        """These rows of a tensor, one after the other."""
        return x.reshape(-1, *x.shape[2:]) if self.all else x[self.index]

    def put(self, out: Shaped[Tensor, "B L *K"], values: Shaped[Tensor, "R *K"]) -> None:
        """Write values to these rows of a (B, L, ...) tensor."""
        if self.listed and not self.all:
            out[self.index] = values
            return
        full = values.reshape(out.shape)
        if self.listed:
            out.copy_(full)
        else:
            out.copy_(torch.where(self.mask.reshape(*self.mask.shape, *[1] * (out.ndim - 2)), full, out))


def _tables(emission: Emission, ev: Evidence) -> Iterator[tuple[Emission, Bool[Tensor, "B L"] | None]]:
    """Each emission table with the positions that it serves (None: all of them)."""
    if not emission.per_position:
        yield emission, None
        return
    for t in range(ev.shape[1]):
        here = torch.zeros(ev.shape, dtype=torch.bool, device=ev.device)
        here[:, t] = True
        yield emission.at(t), here


def _rows(ev: Evidence, kind: Kind, here: Bool[Tensor, "B L"] | None) -> Rows:
    mask = ev.rows(kind)
    return Rows(mask if here is None else mask & here)


def dense_weights(ev: Evidence, rows: Rows, dtype: torch.dtype) -> tuple[Float[Tensor, "R V"], Float[Tensor, " R"]]:
    """The dense potentials of some rows as weights that sum to one, and the logarithm of what they summed to.

    Logits sum to one by definition (0). A row without any possible token gives weights of zero.
    """
    assert ev.potentials is not None
    x, heat = rows.take(ev.potentials), ev.heat(dtype)
    if ev.normalised:
        x = tempered(x, rows.take(heat.expand(*ev.shape, 1)) if isinstance(heat, Tensor) else heat, dtype)
    x = x.to(dtype)
    p = x.softmax(-1)
    if ev.normalised and rows.listed and not bool(p[:, :1].isnan().any()):  # no row is empty
        return p, p.new_zeros(len(p))
    top = x.amax(-1)
    empty = top == -torch.inf
    if p.device.type != "cpu" or bool(empty.any()):
        p = p.masked_fill(empty[:, None], 0.0)
    if ev.normalised:
        return p, torch.zeros_like(top)
    return p, torch.where(empty, 0, top - p.amax(-1).log())


def _observed(table: Emission, ev: Evidence, rows: Rows) -> Float[Tensor, "R N"]:
    assert ev.tokens is not None
    tokens = rows.take(ev.tokens)
    if not rows.listed:  # tokens of other rows may be a mask id outside the table
        tokens = tokens.clamp(0, table.stored.shape[-1] - 1)
    return table.columns[tokens]


def _mixed(weights: Float[Tensor, "R V"], table: Emission, compiled: bool) -> Float[Tensor, "R N"]:
    """The leaf values of each row of weights: the sum over tokens v of w(v) E[:, v]."""
    panels = table.panels if compiled and len(weights) <= native.MAX_ROWS else None
    return weights @ table.columns if panels is None else native.product(weights, panels)


def sparse_weights(
    ev: Evidence, rows: Rows, vocab: int, dtype: torch.dtype
) -> tuple[Int[Tensor, "R K"], Float[Tensor, "R K"], Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Listed ids, their weights, the weight of every other token, and the logarithm of the scale taken out of both."""
    assert ev.sparse is not None
    listed = rows.take(ev.sparse.log_weights).to(dtype)
    tail = rows.take(ev.sparse.log_tail_weight(vocab)).to(dtype)
    top = torch.maximum(listed.amax(-1), tail)
    finite = torch.where(top > -torch.inf, top, 0)
    return rows.take(ev.sparse.ids), (listed - finite[:, None]).exp_(), (tail - finite).exp_(), finite


def _sparse(table: Emission, ev: Evidence, rows: Rows) -> tuple[Float[Tensor, "R N"], Float[Tensor, " R"]]:
    """sum_k E[:, id_k] w_k, and the tail spread evenly over what the listed tokens leave of each row."""
    columns = table.columns
    ids, weights, tail, log_scale = sparse_weights(ev, rows, columns.shape[0], columns.dtype)
    # sum_k E w_k + tail (1 - sum_k E) = tail + sum_k E (w_k - tail): one pass over the listed rows.
    listed = embedding_bag(ids, columns, per_sample_weights=weights - tail[:, None], mode="sum")
    values = (listed + tail[:, None]).clamp_min_(0)
    if rows.listed:  # what the two leave of each other is noise: ask the reference, which sums over all tokens
        noise = tail * (1e4 * torch.finfo(values.dtype).eps)
        values = values.masked_fill_(values < noise[:, None], 0)
    return values, log_scale


def leaf_values(emission: Emission, ev: Evidence, *, compiled: bool = False) -> Scaled:
    """sum_v E[i, v] w_t(v) at every position, scaled so that the largest entry of a row is one.

    Observed rows are one look-up, missing rows nothing. ``compiled``: a few dense rows are multiplied in C.
    """
    batch, length = ev.shape
    states, dtype = emission.stored.shape[-2], emission.dtype
    if ev.potentials is None and ev.sparse is None and ev.tokens is None and ev.latent_log_potentials is not None:
        return exponentials(ev.latent_log_potentials.to(dtype))
    # Position-major in memory, as the chain will read it.
    out = torch.ones(length, batch, states, dtype=dtype, device=ev.device).transpose(0, 1)
    scale = torch.zeros(batch, length, dtype=dtype, device=ev.device)
    for table, here in _tables(emission, ev):
        if ev.potentials is not None and (rows := _rows(ev, Kind.DENSE, here)):
            weights, log_total = dense_weights(ev, rows, dtype)
            rows.put(out, _mixed(weights, table, compiled))
            rows.put(scale, log_total)
        if ev.sparse is not None and (rows := _rows(ev, Kind.SPARSE, here)):
            values, log_total = _sparse(table, ev, rows)
            rows.put(out, values)
            rows.put(scale, log_total)
        if ev.tokens is not None and (rows := _rows(ev, Kind.OBSERVED, here)):
            rows.put(out, _observed(table, ev, rows))
    leaf = Scaled(out, scale[..., None])
    if ev.latent_log_potentials is not None:
        leaf = leaf * exponentials(ev.latent_log_potentials.to(dtype))
    return _rescaled(leaf)


def _rescaled(leaf: Scaled) -> Scaled:
    """The same with the largest entry of each row at one.

    On the CPU a row that is small throughout stays so: it may have lost digits, which `underflow.suspects` then sees.
    """
    values = leaf.values.transpose(0, 1)
    top = values.amax(-1, keepdim=True)
    top.masked_fill_(top <= (LEAF_FLUSH if top.device.type == "cpu" else 0), 1)
    return Scaled(values.div_(top).transpose(0, 1), leaf.log_scale + top.log().transpose(0, 1))


def _cavity(ev: Evidence, leaf: Scaled, posterior: Scaled) -> tuple[Float[Tensor, "B L N"], Float[Tensor, "B L"]]:
    """q_t(i) over the token part of the leaf value, and the logarithm of its scale.

    Multiplied with E[i, v] and the weight of v it is p(z_t = i, x_t = v | evidence).
    """
    q, values, scale = posterior.normalised(), leaf.values, -leaf.log_scale
    if ev.latent_log_potentials is not None:
        latent = exponentials(ev.latent_log_potentials.to(values.dtype))
        q, scale = q * latent.values, scale + latent.log_scale
    return torch.where(values > 0, q / values, 0), scale[..., 0]


def token_marginals(
    emission: Emission, ev: Evidence, leaf: Scaled, posterior: Scaled, candidates: Int[Tensor, "B L K"] | None = None
) -> Float[Tensor, "B L V"]:
    """log p(x_t = v | evidence), for all tokens or for the candidates."""
    inner, scale = _cavity(ev, leaf, posterior)
    log_weights = ev.dense_log_weights(emission.stored.shape[-1], emission.dtype)
    if candidates is None:
        expected = emission.emitted(inner, slice(None))
    else:
        expected = (emission.columns_of(candidates) @ inner[..., None])[..., 0]
        log_weights = log_weights.gather(-1, candidates)
    alive = (posterior.values > 0).any(-1)[..., None]
    return (expected.log() + log_weights + scale[..., None]).masked_fill_(~alive, -torch.inf)


def emission_flow(
    emission: Emission, ev: Evidence, leaf: Scaled, posterior: Scaled, weights: Float[Tensor, " B"] | None
) -> Float[Tensor, "*L N V"]:
    """Expected number of times that each state emits each token: E times (cavity, transposed, times weights)."""
    vocab, dtype = emission.stored.shape[-1], emission.dtype
    inner, inner_scale = _cavity(ev, leaf, posterior)
    if weights is not None:  # a sequence without weight may hold infinities: it is answered elsewhere
        share = weights.to(dtype)[:, None, None]
        inner = torch.where(share != 0, inner * share, 0)

    def cavity(rows: Rows, log_scale: Float[Tensor, " R"]) -> Float[Tensor, "R N"]:
        share = (rows.take(inner_scale) + log_scale).exp()
        c = rows.take(inner) * torch.where(share < torch.inf, share, 0)[:, None]
        return c if rows.listed else torch.where(rows.mask.reshape(-1, 1), c, 0)

    tables = []
    for table, here in _tables(emission, ev):
        flow = torch.zeros(table.stored.shape, dtype=dtype, device=ev.device)
        counts = torch.zeros(flow.shape[1], flow.shape[0], dtype=dtype, device=ev.device)
        if ev.potentials is not None and (rows := _rows(ev, Kind.DENSE, here)):
            full, log_scale = dense_weights(ev, rows, dtype)
            flow += cavity(rows, log_scale).T @ full
        for kind in (Kind.MISSING, Kind.OBSERVED, Kind.SPARSE):
            if rows := _rows(ev, kind, here):
                ids, listed, rest, log_scale = _listed(ev, kind, rows, vocab, dtype)
                c = cavity(rows, log_scale)
                flow += (c * rest[:, None]).sum(0)[:, None]
                counts.index_add_(0, ids.flatten(), ((listed - rest[:, None])[..., None] * c[:, None]).flatten(0, 1))
        tables.append((flow + counts.T) * table.linear.to(dtype))
    return torch.stack(tables) if emission.per_position else tables[0]


def _listed(
    ev: Evidence, kind: Kind, rows: Rows, vocab: int, dtype: torch.dtype
) -> tuple[Int[Tensor, "R K"], Float[Tensor, "R K"], Float[Tensor, " R"], Float[Tensor, " R"]]:
    """As `sparse_weights`, for any kind but the dense one."""
    if kind == Kind.SPARSE and ev.sparse is not None:
        return sparse_weights(ev, rows, vocab, dtype)
    one = torch.ones(len(rows), dtype=dtype, device=ev.device)
    none = torch.zeros_like(one)
    if kind == Kind.OBSERVED and ev.tokens is not None:
        return rows.take(ev.tokens).clamp(0, vocab - 1)[:, None], one[:, None], none, none
    return none.long()[:, None], one[:, None], one, none
