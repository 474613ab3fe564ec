"""Every query on the accelerator against the CPU in float64; and the path that lists no rows, also without one."""

import pytest
import torch

from codd.circuits import HMM, Evidence, SparsePotentials, ops

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


def answers(hmm: HMM, ev: Evidence, ids: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
    flows = hmm.flows(ev, torch.tensor([1.0, -2.0, 0.5], device=ev.device))
    steps = flows.transition if isinstance(flows.transition, tuple) else (flows.transition,)
    return {
        "log_partition": hmm.log_partition(ev),
        "posterior": hmm.posterior(ev).exp(),
        "marginals": hmm.marginals(ev).exp(),
        "candidates": hmm.marginals(ev, ids[..., None].expand(-1, -1, 4)).exp(),
        "conditional": hmm.conditional_log_prob(ids, ev),
        "scores": hmm.conditional_scores(ev, latents),
        "initial": flows.initial,
        **{f"transition {i}": step for i, step in enumerate(steps)},
        "emission": flows.emission,
    }


def compare(hmm: HMM, ev: Evidence, exact: HMM, truth: Evidence) -> None:
    g = torch.Generator().manual_seed(7)
    ids, latents = torch.randint(0, V, (B, L), generator=g), torch.randint(0, N, (B, L), generator=g)
    with ops.use("reference"):
        want = answers(exact, truth, ids, latents)
    got = answers(hmm, ev, ids.to(ev.device), latents.to(ev.device))
    for name, value in want.items():
        torch.testing.assert_close(
            got[name].cpu().double(), value, rtol=2e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_query_agrees_with_the_cpu(layout):
    hmm = HMM.random(N, V, seed=1, **LAYOUTS[layout])
    compare(
        hmm.to(DEVICE),
        mixed_evidence(torch.float32).to(DEVICE),
        hmm.to(dtype=torch.float64),
        mixed_evidence(torch.float64),
    )


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
