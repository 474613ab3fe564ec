"""What the circuit adds to a denoising step: whole runs of `model.generate`, factorized and coupled in turn.

    python benchmarks/decoding.py mini                      # the bundled model and circuit, on a CPU
    python benchmarks/decoding.py llada --json FILE         # LLaDA-8B's shape with random weights, on a GPU
    python benchmarks/decoding.py llada --temperature 0.7 --tokens 8          # drawn tokens
    python benchmarks/decoding.py llada --threshold 0.9     # as many tokens a step as are sure, or --entropy-budget
    python benchmarks/decoding.py llada --length 64 --blocks 1                # few tokens in all: the weights' own time
    python benchmarks/decoding.py llada --device cpu --layers 1 --width 128 --states 8 --length 64     # a tiny one

A run fills some blocks as the loop always does it: network, order, sampler, commit, without stopping at an
end-of-text; mini answers word problems, and LLaDA's shape ends a text of fixed length.
Runs are interleaved, and the overhead is that of a coupled step over a factorized step of the same round: with a
threshold or a budget the runs differ in their number of steps. Random
weights give nearly uniform logits, which no trained model does; the head of the LLaDA shape is therefore scaled so
that logits spread like a trained model's (``--spread``, their standard deviation).
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import codd
from codd.backbones.backbone import Backbone
from codd.circuits import HMM
from codd_lab.problems import problems
from families import SHAPES, random_backbone, spec_of
from timing import Timing, head, interleaved, save

SAMPLERS = ("factorized", "latent", "any_order")
LLADA_8B = SHAPES["llada"] | {"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081}
LLADA_8B |= {"weight_tying": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mini", "llada"))
    parser.add_argument("--length", type=int, default=640, help="tokens of the whole text of llada (default: 640)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 4, 2], help="a step")
    parser.add_argument("--blocks", type=int, default=2, help="of 32 tokens, that are filled in a run")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threshold", type=float, help="instead of --tokens")
    parser.add_argument("--entropy-budget", type=float, help="instead of --tokens")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    add_model_arguments(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = model_from(args, parser)
    free = args.threshold is not None or args.entropy_budget is not None
    paces = {"as many as pass": None} if free else {str(tokens): tokens for tokens in args.tokens}
    report = {
        **head(args, model.backbone.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.backbone.dtype),
        "circuit": repr(model.circuit),
        "tokens": {name: measure(model, tokens, args) for name, tokens in paces.items()},
    }
    print(json.dumps(report, indent=1))
    save(report, args.json)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which device, and the sizes of llada."""
    parser.add_argument("--device", help="cpu or cuda (default: cpu for mini, cuda for llada)")
    parser.add_argument("--states", type=int, help="of a random circuit (default: 1024; the bundled for mini)")
    parser.add_argument("--layers", type=int, default=LLADA_8B["n_layers"], help="of llada")
    parser.add_argument("--width", type=int, default=LLADA_8B["d_model"], help="of llada, a multiple of 128")
    parser.add_argument("--spread", type=float, default=8.0, help="standard deviation of the logits of llada")


def model_from(args: argparse.Namespace, parser: argparse.ArgumentParser) -> codd.Model:
    args.device = args.device or ("cpu" if args.what == "mini" else "cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        tiny = "--device cpu" if args.what == "mini" else "--device cpu --layers 1 --width 128 --states 8"
        parser.exit(2, f"{parser.prog}: needs a CUDA device, and PyTorch finds none; for a tiny run: {tiny}\n")
    if args.what == "mini":
        circuit = "trained" if args.states is None else HMM.random(args.states, 8192, args.seed)
        return codd.load(circuit=circuit, device=args.device)
    backbone, circuit = llada_8b(args)
    return codd.Model(backbone, circuit, None, backbone.special.mask)


@torch.no_grad()
def llada_8b(args: argparse.Namespace) -> tuple[Backbone, HMM]:
    """Random weights, made on the device: 16 GB would take minutes to come there."""
    torch.manual_seed(args.seed)
    heads, mlp = args.width // 128, 3 * args.width
    sizes = {"n_layers": args.layers, "d_model": args.width, "mlp_hidden_size": mlp}
    sizes |= {"n_heads": heads, "n_kv_heads": heads}
    backbone = random_backbone(spec_of("llada", LLADA_8B | sizes), torch.device(args.device), torch.bfloat16)
    ids = torch.randint(0, 126000, (1, 64), device=args.device)
    assert backbone.network.head.weight is not None  # it is not tied
    backbone.network.head.weight.mul_(args.spread / float(backbone(ids).float().std()))
    states, vocab = args.states or 1024, backbone.vocab_size

    def table(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=args.device).log_softmax(-1)

    circuit = HMM(table(states), table(states, states), table(states, vocab), window=32).to(emission=torch.bfloat16)
    torch.cuda.empty_cache()
    return backbone, circuit


def random_prompts(vocab_size: int, length: int, args: argparse.Namespace) -> list[list[int]]:
    """Any tokens: weights that were never trained have nothing to say about better ones."""
    generator = torch.Generator().manual_seed(args.seed)
    ids: list[list[int]] = torch.randint(10, vocab_size - 1000, (args.batch, length), generator=generator).tolist()
    return ids


def measure(model: codd.Model, tokens: int | None, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds per step, and the overhead over the factorized run."""
    written = args.blocks * 32
    if args.what == "mini":  # what is measured is then what users see, sure tokens and unsure ones
        prompts = model.encode([problem.question for problem in problems(args.batch, split="test", seed=args.seed)])
    else:
        prompts = random_prompts(model.backbone.vocab_size, args.length - written, args)
    pace = {"steps": None if tokens is None else written // tokens}
    if tokens is None:
        pace |= {"threshold": args.threshold, "entropy_budget": args.entropy_budget}
    steps: dict[str, int] = {}

    def run(sampler: str) -> Callable[[], None]:
        options = {"gen_length": written, "sampler": sampler, "temperature": args.temperature, **pace}

        def go() -> None:
            steps[sampler] = max(model.generate(prompts, **options, stop=False, seed=args.seed).steps)

        return go

    # What one path makes probable passes any threshold.
    runs = {sampler: run(sampler) for sampler in SAMPLERS if tokens is not None or sampler != "latent"}
    times = interleaved(runs, rounds=args.rounds, warmup=args.warmup, burst=1)
    return {sampler: _row(times, steps, sampler) for sampler in runs}


def _row(times: Mapping[str, Timing], steps: Mapping[str, int], sampler: str) -> dict[str, float]:
    over, fewer = times[sampler].over(times["factorized"]), steps["factorized"] / steps[sampler]
    return {
        "steps": steps[sampler],
        "ms_a_step": times[sampler].milliseconds.median / steps[sampler],
        "overhead": over.median * fewer - 1,
        "lower": over.lower * fewer - 1,
        "upper": over.upper * fewer - 1,
    }


if __name__ == "__main__":
    main()
