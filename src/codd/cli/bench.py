"""``codd bench``: what the engine costs on this machine, side by side with others."""

import argparse
from dataclasses import replace
from typing import Any, TypeVar

import torch
from rich.console import RenderableType

from codd.cli import console
from codd.errors import CoddError
from codd.evaluation import joint_step, rivals

NAME = "bench"
HELP = """\
Measures the circuit engine on this machine. On a CPU every query is timed in turns with plain PyTorch and with the
libraries that are installed (dynamax, pomegranate, hmmlearn, libcirkit: pip install 'codd[bench]'), after checking
that their answers agree; the ratios are medians over rounds. On a GPU the stages of one joint step are timed inside
a CUDA graph, with the bytes that each must move and the ratio to the time in which this GPU reads as many.

Prints tables with the machine, versions, sizes and seed beside them."""

Settings = TypeVar("Settings", rivals.Settings, joint_step.Settings)
_SIZES = ("states", "tokens", "length", "batch")


def configure(parser: argparse.ArgumentParser) -> None:
    """What to measure, where, and the sizes."""
    parser.epilog = """\
examples:
  codd bench circuits                          # this machine's GPU if it has one, else its CPU
  codd bench circuits --device cpu --threads 1
  codd bench circuits --device cuda --batch 8 --json > step.json"""
    parser.add_argument("what", choices=("circuits",), help="the circuit engine (models follow)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if any")
    for size in _SIZES:
        parser.add_argument(f"--{size}", type=_positive, help="default: 256, 8192, 32, 8 (CPU); LLaDA's size (GPU)")
    parser.add_argument("--threads", type=_positive, help="CPU only: cores to use (default: all)")
    parser.add_argument("--rounds", type=_positive, help="CPU only: how often each contender runs (default: 30)")
    parser.add_argument("--emission", choices=("bfloat16", "float32"), help="GPU only: default bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the random circuit and evidence (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    cuda = torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        raise CoddError("--device cuda, but PyTorch finds no CUDA device on this machine; try --device cpu")
    on_gpu = cuda if args.device == "auto" else args.device == "cuda"
    _refuse(args, ("threads", "rounds") if on_gpu else ("emission",), "GPU" if on_gpu else "CPU")
    report, table = _gpu(args) if on_gpu else _cpu(args)
    if args.json:
        console.as_json(report)
    else:
        console.out().print(table)
    return 0


def _cpu(args: argparse.Namespace) -> tuple[dict[str, Any], RenderableType]:
    with console.err().status("preparing") as status:
        report = rivals.run(_set(rivals.Settings(), args, (*_SIZES, "threads", "rounds", "seed")), status.update)
    return report, rivals.render(report)


def _gpu(args: argparse.Namespace) -> tuple[dict[str, Any], RenderableType]:
    settings = _set(joint_step.Settings(), args, (*_SIZES, "emission", "seed"))
    with console.working("compiling the kernels and measuring"):
        report = joint_step.run(settings)
    return report, joint_step.render(report)


def _set(settings: Settings, args: argparse.Namespace, names: tuple[str, ...]) -> Settings:
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return replace(settings, **given)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], device: str) -> None:
    """An option that would be ignored is a mistake."""
    for name in names:
        if getattr(args, name) is not None:
            raise CoddError(f"--{name} says nothing about a {device} run: leave it out, or choose another --device")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value
