"""What exact batch independence costs on a CPU: sequences one by one against all at once, in turns, with mini.

python benchmarks/rows_cpu.py --threads 2
"""

import argparse

import torch
from torch import Tensor

import codd
from timing import interleaved

SIZES = ("8x24", "8x64", "8x200", "4x300", "1x300")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="batch x length, as in 8x24")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    backbone = codd.load(device="cpu").backbone
    network, generator = backbone.network, torch.Generator().manual_seed(args.seed)
    print(f"torch {torch.__version__}, {args.threads} thread(s), float32, median of {args.rounds} rounds")
    for batch, length in (map(int, size.split("x")) for size in args.sizes):
        ids = torch.randint(5, backbone.vocab_size, (batch, length), generator=generator)
        positions = torch.arange(length).expand(ids.shape)

        def at_once(ids: Tensor = ids, positions: Tensor = positions) -> Tensor:
            return network.logits(network.states(ids, positions))

        def one_by_one(ids: Tensor = ids) -> Tensor:
            logits: Tensor = backbone(ids)
            return logits

        times = interleaved({"at once": at_once, "one by one": one_by_one}, args.rounds, warmup=1, burst=1)
        once, single = times.values()
        print(
            f"B {batch} L {length:3d}: at once {once.milliseconds.median:6.0f} ms, one by one "
            f"{single.milliseconds.median:6.0f} ms, x{single.over(once).median:.2f}"
        )


if __name__ == "__main__":
    main()
