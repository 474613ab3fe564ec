"""The commands of docs/reproduce.md, from the first to the last, on tiny networks and data under the hub's names.

A hub id is first looked for as a folder of that name where a command runs, so stand-ins in the published layouts lie
there. Of the commands only sizes are changed (`SMALL`), and options are added (`ADDED`).
"""

import json
import pickle
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from codd.backbones import adapters, load_checkpoint
from codd.cli import main
from codd.training.circuit.joint import trainable
from codd.training.logit_cache.reader import LogitCache
from codd_lab import samples
from codd_lab.problems import problems
from codd_lab.runs import Run
from tests.circuits.test_pyjuice import chain
from tests.lab.test_published_causal import FIXTURES, TOKENS, WORDS, gpt2
from tests.support import ROOT
from tests.support.small_circuits import save_published
from tests.support.small_data import data

pytest.importorskip("lm_eval")
PAGE = ROOT / "docs" / "reproduce.md"
BACKBONES = {"llada": "GSAI-ML/LLaDA-8B-Instruct", "dream": "Dream-org/Dream-v0-Instruct-7B"}
VOCABULARY, WINDOW = 400, 32
SMALL = {
    "--steps": "2",
    "--gen-length": "32",
    "--problems": "1",
    "--tune": "1",
    "--windows": "40",
    "--row-length": "128",
    "--count": "8",
    "--length": "128",
}
GRIDS = {"--circuit-temperature": 1, "--activation": 2, "--remasking": 2}
"""How many values of these options are kept."""
ADDED = {
    "samples": "--device cpu",
    "cache": "--top-k 16 --device cpu",
    "eval": "--problems 1 --device cpu",
    "report": "--no-png",
    "train": "--device cpu --set dtype=float32 --set steps=2 --set batch_windows=8 --set row_length=128 "
    "--set circuit.num_states=8 --set ratios=[0.5]",
}
RANKS = "--set circuit.emission_rank=4 --set circuit.transition_rank=4 --set head.hidden=4"


def commands() -> Iterator[list[str]]:
    """The words of every command on the page."""
    for code in re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for line in code.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def shortened(arguments: list[str]) -> list[str]:
    """A command of codd with small sizes."""
    changed = []
    for flag, value in zip(["", *arguments], arguments, strict=False):
        kept = value.split(",")[: GRIDS[flag]] if flag in GRIDS else [value]
        changed.append(SMALL.get(flag, ",".join(kept)))
    more = ADDED[arguments[0]].split()
    modulated = arguments[:2] in (["train", "llada-modulated"], ["train", "dream-modulated"])
    return [*changed, *more, *(RANKS.split() if modulated else [])]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_dataset(repo: str, config: str, splits: dict[str, Path]) -> None:
    """Files in the layout of a data set on the hub, whose card names its configuration and splits."""
    folder = Path(repo)
    folder.mkdir(parents=True)
    named = []
    for split, path in splits.items():
        shutil.copy(path, folder / f"{split}-file{path.suffix}")
        named.append({"split": split, "path": f"{split}-file{path.suffix}"})
    card = json.dumps({"configs": [{"config_name": config, "data_files": named}]})  # JSON is YAML
    (folder / "README.md").write_text(f"---\n{card}\n---\n")


def save_datasets(made: Path) -> None:
    data(made)
    save_dataset("openai/gsm8k", "main", {split: made / f"gsm8k/{split}.jsonl" for split in ("train", "test")})
    save_dataset("HuggingFaceH4/MATH-500", "default", {"test": made / "math/math500.jsonl"})
    mbpp = made / "mbpp/mbpp.jsonl"
    save_dataset("google-research-datasets/mbpp", "full", {"test": mbpp, "validation": mbpp})
    save_dataset("Idavidrein/gpqa", "gpqa_main", {"train": made / "gpqa/gpqa_main.csv"})
    pairs = [{"instruction": p.question, "output": p.solution} for p in problems(40)]
    write_lines(made / "mathinstruct.json", pairs * 51)  # beyond the 2,000 that are held out
    save_dataset("TIGER-Lab/MathInstruct", "default", {"train": made / "mathinstruct.json"})
    words = " ".join(f"w{n * n % TOKENS or 1}" for n in range(800))
    lines = [" \n", " = Title = \n", " \n", f" {words} \n", f" {words} \n"]
    write_lines(made / "wikitext.jsonl", [{"text": line} for line in lines])
    save_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", {"validation": made / "wikitext.jsonl"})


def save_models() -> None:
    for family, repo in BACKBONES.items():
        Path(repo).parent.mkdir()
        config = save_published(Path(repo), family) / "config.json"
        longer = {"max_sequence_length": 512, "max_position_embeddings": 512}
        config.write_text(json.dumps({**json.loads(config.read_text()), **longer}))
        for task in ("math", "gsm", "code"):
            folder = Path(f"il18/{family}-{task}-pc")
            folder.mkdir(parents=True)
            (folder / "model.jpc").write_bytes(pickle.dumps(chain(WINDOW, v=VOCABULARY)))
    shutil.copytree(FIXTURES / "sedd", "louaaron/sedd-medium")
    for name in ("gpt2", "gpt2-large"):
        gpt2(Path("openai-community") / name, WORDS)
    backbone = load_checkpoint(BACKBONES["llada"], device="cpu").backbone
    trainable(backbone, "lora", 2, 0)
    adapters.save(backbone, Path("adapters/diffu-grpo"), BACKBONES["llada"])


@pytest.fixture
def hub(tmp_path, monkeypatch) -> None:
    """A folder with stand-ins for all that the page takes from the hub, which itself is out of reach."""
    import datasets
    import huggingface_hub

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    save_datasets(tmp_path / "made")
    save_models()


def check_written(verb: str, out: Path) -> None:
    """A run ends with what the page promises of it."""
    if verb == "train":
        assert (out / "circuit" / "circuit.safetensors").is_file()
    elif verb == "cache":
        assert len(LogitCache.open(out)) > 0
    elif verb == "report":
        assert (out / "report.html").stat().st_size > 1000
    else:
        run = Run(out)
        assert run.results() or run.studies()


def test_every_command_runs_to_its_table(hub, capsys, monkeypatch):
    ran = []
    for words in commands():
        match words:
            case ["codd", *arguments]:
                assert main(shortened(arguments)) == 0, shlex.join(words)
                out = arguments[arguments.index("--out") + 1] if "--out" in arguments else arguments[1]
                check_written(arguments[0], Path(out))
                ran.append(out)
            case ["python", "-c", program]:
                exec(compile(program, str(PAGE), "exec"), {})
            case ["python", "-m", "codd_lab.samples", *arguments]:
                monkeypatch.setattr("sys.argv", shortened(["samples", *arguments]))
                samples.main()
            case ["hf", "download", repo, *names, "--local-dir", folder]:
                for path in [Path(repo, name) for name in names] or Path(repo).iterdir():
                    Path(folder).mkdir(exist_ok=True)
                    shutil.copy(path, folder)
            case ["mkdir", "-p", folder]:
                Path(folder).mkdir(parents=True)
            case _:
                assert words[0] == "pip", shlex.join(words)
    assert len(ran) > 30
    tables = Run(Path("runs/table1")).results()
    assert len({result.config.task for result in tables}) == 4
    circuits = {f"il18/llada-{name}-pc" for name in ("math", "gsm", "code")}
    assert {result.config.circuit for result in tables} == circuits | {"null", "none"}
    assert all(result.judged for result in Run(Path("runs/open-text")).results())
    study = Run(Path("runs/likelihood")).studies()["continuations"]
    [corpus] = study["data"].values()
    assert {"factorized", "dcd", "circuit:runs/sedd-gpt2/circuit", "circuit:null"} <= set(
        corpus["contexts"][0]["scores"]
    )
