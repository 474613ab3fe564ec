"""Every query on the accelerator against the CPU in float64."""

import pytest
import torch

from codd.circuits import HMM, Evidence, SparsePotentials
from tests.support.contract import assert_agrees

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
B, L, N, V = 3, 5, 6, 300
LAYOUTS = {
    "plain": {},
    "low rank": {"rank": 3},
    "per position": {"length": L},
    "both": {"rank": 2, "length": L},
}


def mixed_evidence(dtype: torch.dtype) -> Evidence:
    """All kinds of evidence in one batch; a mask id outside of the vocabulary stands at unobserved positions."""
    g = torch.Generator().manual_seed(4)
    kind = torch.randint(0, 4, (B, L), generator=g)
    logits = 2 * torch.randn(B, L, V, generator=g)
    tokens = torch.randint(0, V, (B, L), generator=g)
    return Evidence(
        tokens=torch.where(kind == 0, tokens, V + 7),
        observed=kind == 0,
        logits=logits.to(dtype),
        temperature=torch.tensor([0.5, 1.0, 2.0], dtype=dtype),
        sparse=SparsePotentials.from_logits(logits.to(dtype), 20),
        dense=kind == 1,
        missing=kind == 3,
        latent_log_potentials=torch.randn(B, L, N, generator=g).to(dtype),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_query_agrees_with_the_cpu(layout):
    hmm = HMM.random(N, V, seed=1, **LAYOUTS[layout])
    assert_agrees(hmm.to(DEVICE), mixed_evidence(torch.float32).to(DEVICE), atol=5e-4, backend=None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_on_the_device_follow_the_evidence(layout):
    hmm = HMM.random(N, V, seed=1, **LAYOUTS[layout]).to(DEVICE)
    ev = mixed_evidence(torch.float32).to(DEVICE)
    drawn = hmm.sample(ev, generator=torch.Generator(DEVICE).manual_seed(0), num_samples=50)
    again = hmm.sample(ev, generator=torch.Generator(DEVICE).manual_seed(0), num_samples=50)
    assert drawn.tokens.shape == drawn.latents.shape == (50, B, L)
    assert torch.equal(drawn.tokens, again.tokens)
    assert torch.equal(
        torch.where(ev.observed, drawn.tokens, 0), torch.where(ev.observed, ev.tokens, 0).expand(50, B, L)
    )
    assert bool(((drawn.tokens >= 0) & (drawn.tokens < V)).all())
    share = (drawn.latents[..., None] == torch.arange(N, device=DEVICE)).double().mean(0)
    assert float((share - hmm.posterior(ev).exp()).abs().max()) < 0.25  # 50 draws: 3.5 standard deviations
