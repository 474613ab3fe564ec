"""A network in Nemotron-Labs-Diffusion's layout, trained for a minute: do drafts that its causal mode checks pay?

    python benchmarks/nemotron.py --seconds 60 --out nemotron.json

One set of weights learns both modes on made-up sentences: left to right, and to fill a block whose context is read
causally. A circuit is then trained for its drafts. Texts are written by drafts with the circuit, drafts with the null
circuit, and the causal mode alone; greedy ones must be the same text.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import codd
from codd.backbones import nemotron
from codd.backbones.backbone import Backbone
from codd.backbones.causal import CausalModel
from codd.backbones.config import Config
from codd.backbones.transformer import AttentionContext, Transformer, initialise, rotary_angles
from codd.circuits import Factors
from speculative import plain, ratio

BLOCK, LENGTH, ROWS, PROMPT, NEW = 8, 64, 24, 12, 48
PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jana"]
PLACES = ["San Diego", "New York", "Los Angeles", "Hong Kong", "Buenos Aires", "Cape Town", "Salt Lake City"]
THINGS = ["ice cream", "olive oil", "hot soup", "red wine", "black tea", "green tea", "rye bread"]
FRAMES = (
    "{a} lives in {p} and sells {t} . ",
    "{a} went from {p} to {q} . In {q} there is no {t} . ",
    "{a} and {b} like {t} . So {b} bought {t} in {p} . ",
    "In {p} {a} met {b} , who is from {q} . ",
)
WORDS = sorted({word for text in (*PEOPLE, *PLACES, *THINGS, *FRAMES) for word in text.split() if "{" not in word})
MASK = len(WORDS)
CONFIG: dict[str, Any] = {
    "model_type": "nemotron_labs_diffusion",
    "architectures": ["NemotronLabsDiffusionModel"],
    **{"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    **{"intermediate_size": 192, "vocab_size": MASK + 1, "mask_token_id": MASK, "block_size": BLOCK},
    "max_position_embeddings": 256,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of training, in seconds of the processor")
    parser.add_argument("--count", type=int, default=100, help="texts (default: 100)")
    parser.add_argument("--states", type=int, default=32, help="of the circuit (default: 32)")
    parser.add_argument("--updates", type=int, default=400, help="of the circuit (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(args.seed)
    spec = nemotron.read_spec(Config(CONFIG))
    backbone = Backbone(spec, Transformer(spec.transformer))
    initialise(backbone.network, generator=torch.Generator().manual_seed(args.seed))
    losses = train_network(backbone, draw, args.seconds)
    circuit = train_circuit(backbone, draw, args.states, args.updates)
    model = codd.Model(backbone, circuit, None, MASK)
    results = {"losses": losses, "texts": evaluate(model, draw, args.count)}
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    report(results)


def rows(draw: random.Random, count: int) -> Tensor:
    """Random texts, cut to one length."""
    numbers, out = {word: number for number, word in enumerate(WORDS)}, []
    for _ in range(count):
        words: list[str] = []
        while len(words) < LENGTH:
            (a, b), (p, q) = draw.sample(PEOPLE, 2), draw.sample(PLACES, 2)
            words += draw.choice(FRAMES).format(a=a, b=b, p=p, q=q, t=draw.choice(THINGS)).split()
        out.append([numbers[word] for word in words[:LENGTH]])
    return torch.tensor(out)


def both_modes(backbone: Backbone, ids: Tensor, noisy: Tensor, phase: int) -> tuple[Tensor, Tensor]:
    """Logits of the causal mode, and of blocks of ``noisy`` that begin at ``phase``, each after the clean context."""
    network, config, length = backbone.network, backbone.config, ids.shape[1]
    place = torch.arange(length)
    block = (place - phase) // BLOCK
    before, own = block[:, None] > block, block[:, None] == block
    causal = place[:, None] >= place
    mask = torch.cat((torch.cat((causal, torch.zeros_like(own)), 1), torch.cat((before, own), 1)))
    positions = torch.cat((place, place)).expand(len(ids), -1)
    scaling = config.rope_scaling
    angles = rotary_angles(positions, config.head_dim, config.rope_theta or 0, scaling)
    query_scale = None if scaling is None else scaling.query_scale(positions)
    context = AttentionContext(angles, mask[None, None], query_scale=query_scale)
    x = network.embedding(torch.cat((ids, noisy), 1), positions, None)
    for layer in network.blocks:
        x = layer(x, context, None)
    assert network.final_norm is not None
    logits = network.logits(network.final_norm(x))
    return logits[:, :length], logits[:, length:]


def train_network(backbone: Backbone, draw: random.Random, seconds: float) -> list[list[float]]:
    """Both losses (nats a token) every hundred steps."""
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=3e-3, weight_decay=0.01)
    begun, losses, step = time.process_time(), [], 0
    while time.process_time() - begun < seconds:
        ids, phase = rows(draw, ROWS), draw.randrange(BLOCK)
        first = (torch.arange(LENGTH) - phase) % BLOCK == 0
        share = torch.rand(ROWS, 1).clamp(min=0.3)
        masked = (torch.rand(ids.shape) < share * 1.4) & ~first
        causal, filled = both_modes(backbone, ids, ids.masked_fill(masked, MASK), phase)
        left_to_right = F.cross_entropy(causal[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        filling = F.cross_entropy(filled[masked], ids[masked])
        optimizer.zero_grad()
        torch.autograd.backward(left_to_right + filling)
        optimizer.step()
        if step % 100 == 0:
            losses.append([step, left_to_right.item(), filling.item()])
            print(losses[-1], flush=True)
        step += 1
    backbone.eval().requires_grad_(False)
    return losses


def train_circuit(backbone: Backbone, draw: random.Random, states: int, steps: int) -> codd.HMM:
    """A circuit for blocks of which the first token alone is known."""
    factors = Factors.near_neutral(states, backbone.vocab_size).map(lambda table: table.clone().requires_grad_())
    optimizer = torch.optim.Adam(list(factors), lr=0.05)
    for step in range(steps):
        ids, phase = rows(draw, ROWS), draw.randrange(BLOCK)
        first = (torch.arange(LENGTH) - phase) % BLOCK == 0
        _, filled = both_modes(backbone, ids, ids.masked_fill(~first, MASK), phase)
        begins = range(phase, LENGTH - BLOCK + 1, BLOCK)
        windows, logits = (torch.cat([each[:, at : at + BLOCK] for at in begins]) for each in (ids, filled))
        logits[..., MASK] = -torch.inf
        masked = torch.ones_like(windows, dtype=torch.bool)
        masked[:, 0] = False
        joint = codd.Coupled(codd.HMM.from_factors(factors), logits=logits, tokens=windows, masked=masked)
        loss = -joint.log_prob(windows).mean() / (BLOCK - 1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            alone = F.cross_entropy(logits[masked], windows[masked])
            print(
                f"circuit, step {step}: {loss.item():.3f} nats a token, the network alone {alone.item():.3f}",
                flush=True,
            )
    return codd.HMM.from_factors(factors.map(Tensor.detach))


def evaluate(model: codd.Model, draw: random.Random, count: int) -> list[dict[str, Any]]:
    """What each way writes after the beginnings of fresh texts, greedy and at temperature 1."""
    found, causal = [], CausalModel(model.backbone.causal)
    for number, ids in enumerate(rows(draw, count)[:, :PROMPT].tolist()):
        for temperature in (0.0, 1.0):
            common: dict[str, Any] = {"gen_length": NEW, "temperature": temperature, "stop": False}
            for name, drafter in {"circuit": model, "null": model.with_circuit("null")}.items():
                steps = list(drafter.denoise([ids], mode="speculative", block_length=BLOCK, seed=number, **common))
                drafts = [step.accepted for step in steps if step.drafted]
                text = {"way": name, "temperature": temperature, "calls": len(steps), "drafts": drafts}
                found.append({**text, "ids": steps[-1].ids.tolist()})
            alone = plain(model, causal, ids, number, common)
            found.append({"way": "causal", "temperature": temperature, "calls": alone["calls"], "drafts": []})
            found[-1]["ids"] = alone["ids"].tolist()
    return found


def report(results: dict[str, Any]) -> None:
    """Accepted tokens of a draft and tokens a call, with intervals over texts; whether greedy texts are the same."""
    texts = results["texts"]
    for temperature in (0.0, 1.0):
        by_way = {
            way: [text for text in texts if (text["way"], text["temperature"]) == (way, temperature)]
            for way in ("circuit", "null", "causal")
        }
        for way, own in by_way.items():
            accepted = [(sum(text["drafts"]), len(text["drafts"])) for text in own]
            calls = ratio([(NEW, text["calls"]) for text in own])
            same = sum(a["ids"] == b["ids"] for a, b in zip(own, by_way["causal"], strict=True))
            shown = ratio(accepted) if any(count for _, count in accepted) else "-"
            print(f"temperature {temperature}: {way:8} accepted {shown:22} tokens a call {calls:22} same text {same}")


if __name__ == "__main__":
    main()
