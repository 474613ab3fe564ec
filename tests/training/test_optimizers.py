import numpy as np
import pytest
import torch

from codd.circuits import HMM
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput
from codd.training.circuit.objectives import Signed, log_tables, signed_flows, weights_of
from codd.training.circuit.optimizers import Anemone
from tests.support.window_truth import LENGTH, VOCAB, circuit, draw

MAKERS = {
    "ratio": lambda: Anemone(momentum=0.9, rule="ratio"),
    "baum-welch": lambda: Anemone(momentum=0.9),
}
RULES = ["ratio", "baum-welch"]


def per_token(signed: Signed) -> float:
    return float(signed.value / signed.tokens)


def assert_normalised(hmm: HMM) -> None:
    for table in log_tables(hmm):
        torch.testing.assert_close(table.exp().sum(-1), torch.ones_like(table[..., 0]))


class SlowAnemone:
    """The specification's six steps, one after the other, position by position."""

    def __init__(self, s: float, m: float, pc: float, rule: str):
        self.s, self.m, self.pc, self.rule, self.u = s, m, pc, rule, 0
        self.buffers: dict[str, np.ndarray] = {}

    def smooth(self, name: str, flow: np.ndarray) -> np.ndarray:
        if self.m == 0:
            return flow
        self.buffers[name] = self.m * self.buffers.get(name, np.zeros_like(flow)) + (1 - self.m) * flow
        return self.buffers[name] / (1 - self.m ** (self.u + 1))

    def anchors(self, theta: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
        out = {name: np.zeros_like(x) for name, x in theta.items()}
        out["initial"] += theta["initial"]
        td = theta["initial"]
        for t in range(length):
            out["emission"] += td[:, None] * theta["emission"]
            if t < length - 1:
                out["transition"] += td[:, None] * theta["transition"]
                td = td @ theta["transition"]
        return {name: (1 - self.s) * x for name, x in out.items()}

    def update(self, theta: dict[str, np.ndarray], plus: dict, minus: dict, weight: float) -> dict:
        new, anchors = {}, self.anchors(theta, LENGTH)
        for name, now in theta.items():
            up = self.smooth(f"+{name}", plus[name]) * self.s / weight
            pc = self.pc / now.shape[-1]
            down = self.smooth(f"-{name}", minus[name]) * self.s / weight
            if self.rule == "ratio":
                row = now * (up + anchors[name] + pc) / (down + anchors[name] + self.pc * now)
            else:
                least = ((down - up) / now).max(-1, keepdims=True)
                anchored = (anchors[name] / now).max(-1, keepdims=True)
                row = up - down + np.maximum(anchored, 2 * np.maximum(least, 0)) * now + pc
            new[name] = row / row.sum(-1, keepdims=True)
        self.u += 1
        return new


def named(tables: tuple[torch.Tensor, ...]) -> dict[str, np.ndarray]:
    return dict(zip(("initial", "transition", "emission"), (x.numpy().copy() for x in tables), strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_anemone_walks_the_specification(rule, momentum):
    hmm = circuit(5)
    theta = {name: np.exp(x) for name, x in named(log_tables(hmm)).items()}
    fast, slow = Anemone(0.3, momentum, 1e-2, rule), SlowAnemone(0.3, momentum, 1e-2, rule)
    for step in range(4):
        windows = draw(step, 3 + 4 * step)
        signed = signed_flows(hmm, windows, weights_of(windows, "elbo"))
        theta = slow.update(theta, named(signed.plus), named(signed.minus), float(signed.weight))
        hmm = fast.update(hmm, signed)
        for found, wanted in zip(log_tables(hmm), theta.values(), strict=True):
            np.testing.assert_allclose(found.exp().numpy(), wanted, rtol=1e-9)


def test_the_default_momentum_does_not_empty_a_large_vocabulary():
    """Of 2,000 tokens a batch has a few: what is taken from the others must not be taken again and again."""
    generator = torch.Generator().manual_seed(0)
    vocab, windows = 2000, 16
    tokens = torch.randint(vocab, (windows, LENGTH), generator=generator)
    logits = torch.randn(windows, LENGTH, vocab, generator=generator, dtype=torch.float64)
    batch = WindowBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), logits)
    least = {}
    for momentum in (0.0, 0.9):
        learner, optimizer = HMM.random(4, vocab, scale=0.5, dtype=torch.float64), Anemone(0.4, momentum, rule="ratio")
        for _ in range(12):
            learner = optimizer.update(learner, signed_flows(learner, batch))
        least[momentum] = float(log_tables(learner)[-1].min())
    assert least[Anemone().momentum] > -40  # nats
    assert least[0.9] < -60  # the paper's, on the way to nothing


def zeros(dtype: torch.dtype) -> HMM:
    """A circuit with entries of probability zero, one of them too small for float32."""
    emission = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.0, 0.0]], dtype=dtype).log()
    emission[0, 2] = -120.0
    transition = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]], dtype=dtype).log()
    return HMM(torch.tensor([0.5, 0.5, 0.0], dtype=dtype).log(), transition, emission)


@pytest.mark.parametrize("name", MAKERS)
def test_zero_probabilities_give_no_nan(name):
    hmm = zeros(torch.float32)
    windows = draw(1, 20)
    possible = torch.isfinite(hmm.log_prob(windows.tokens)).float()
    assert 0 < possible.sum() < 20
    for _ in range(3):
        hmm = MAKERS[name]().update(hmm, signed_flows(hmm, windows, possible))
        assert_normalised(hmm)


def test_a_row_that_nothing_visits_stays():
    hmm = zeros(torch.float64)
    tables = (torch.tensor([0.0, -torch.inf, -torch.inf]).double(), torch.eye(3).double().log(), hmm.log_emission)
    alone = HMM(*tables)
    windows = draw(1)._replace(tokens=torch.zeros(5, LENGTH, dtype=torch.int64))
    new = Anemone(1.0, 0.0, 0.0).update(alone, signed_flows(alone, windows))
    torch.testing.assert_close(new.log_emission[1:], alone.log_emission[1:])
    assert not new.log_emission.isnan().any()


def test_a_batch_that_weighs_less_than_the_step_is_refused():
    light = signed_flows(circuit(1), draw(2), torch.full((5,), 0.01))
    with pytest.raises(InvalidInput, match=r"weigh 0\.04 in all, less than the step size 0\.4"):
        Anemone().update(circuit(1), light)


@pytest.mark.parametrize("name", RULES)
def test_entries_that_32_bits_hardly_hold_give_no_nan(name):
    """Flows over such an entry are more than the largest number."""
    emission = torch.zeros(3, VOCAB)
    emission[:, 2] = -95.0
    start = circuit(1, dtype=torch.float32)
    hmm = HMM(start.log_initial, start.log_transition, emission.log_softmax(-1))
    windows = draw(1, 20)._replace(tokens=torch.zeros(20, LENGTH, dtype=torch.int64))
    signed = signed_flows(hmm, windows)
    signed.minus[-1][:, 2] = 1.0  # as the memory of what it once was
    new = MAKERS[name]().update(hmm, signed)
    assert_normalised(new)
    assert float(new.log_emission[:, 2].max()) < -20
    assert all(bool(table.isfinite().all()) for table in log_tables(new))
