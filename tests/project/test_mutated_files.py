"""Every format that codd reads, damaged at random: what loads is what was saved, or can be used; all else is our error.

CODD_FUZZ=2000 damages about as many files of each kind, rather than 150; -s shows what became of them.
"""

import functools
import json
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from codd.backbones import Tokenizer, adapters, load_checkpoint, mini
from codd.backbones.config import Config
from codd.backbones.transformer import initialise
from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated, load_circuit
from codd.circuits.pyjuice import read_jpc
from codd.constraints import Automaton, cache
from codd.constraints.vocabulary import Vocabulary
from codd.data.sources import Source
from codd.data.tokenization import PackingConfig, load_source
from codd.errors import CoddError
from codd.training.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from codd.training.circuit.joint import trainable
from codd.training.logit_cache.reader import LogitCache
from codd_lab.pretraining.bpe import train_bpe
from tests.support import FIXTURES, ROOT, small_caches
from tests.support.checkpoints import PUBLISHED
from tests.support.mutations import mutated

pytestmark = pytest.mark.usefixtures("as_users_run_it")  # their errors could be taken for the library's own
README = (ROOT / "README.md").read_text(encoding="utf-8")
MUTATIONS = int(os.environ.get("CODD_FUZZ", "150"))
ROOM = 2 << 30
"""Bytes of address space that reading damaged files may take."""
SIZES = {"vocab_size": 300, "width": 16, "layers": 2, "heads": 2, "mlp_width": 24, "max_length": 64}
IDS = {"mask_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def save_mini(folder: Path, int8: bool = False) -> None:
    """A model of ours, with its tokenizer and a chat template in a file of its own."""
    built = mini.build(Config({**SIZES, **IDS}))
    initialise(built.network, generator=torch.Generator().manual_seed(0), std=0.3)
    mini.save(built, folder, int8=int8)
    tokenizer = train_bpe([README], vocab_size=300)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template))


def save_byte_level(folder: Path) -> None:
    """A tokenizer in the older layout."""
    backend = train_bpe([README], vocab_size=300).backend
    backend.model.save(str(folder))
    (folder / "added_tokens.json").write_text('{"<mask>": 300, "<extra>": 301}')
    special = '{"mask_token": "<mask>", "additional_special_tokens": ["<extra>"]}'
    (folder / "special_tokens_map.json").write_text(special)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<extra>"}')


def save_words(folder: Path) -> None:
    """BERT's tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    options = '{"do_lower_case": true, "strip_accents": null, "added_tokens_decoder": {"17": {"content": "<x>"}}}'
    (folder / "tokenizer_config.json").write_text(options)


def save_unigram(folder: Path) -> None:
    """A tokenizer with the parts that ours does not have."""
    pieces = [("<unk>", 0.0), ("\u2581", -1.0), *((letter, -2.0) for letter in "abcest")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    backend.save(str(folder / "tokenizer.json"))


def save_modulated(folder: Path) -> None:
    """A circuit with everything that one can have."""
    factors = Factors.near_neutral(6, 9, transition_rank=2, emission_rank=3, inner_states=4)
    head = Head(HeadConfig(features=5, states=6, inner_states=4, hidden=7, dropout=0.1))
    Modulated(HMM.from_factors(factors, window=3), head).save(folder, half=True)


def use_model(folder: Path, check: bool) -> Any:
    """The parameters; whatever came of tokenizer and template must work on a text, or say why it does not."""
    backbone, tokenizer, _ = load_checkpoint(folder, device="cpu", check=check)
    backbone(torch.zeros(1, 3, dtype=torch.long))
    return {**backbone.network.state_dict(), **use_tokens(tokenizer)}


def save_adapter(folder: Path) -> None:
    """Additions to one of our networks, with every kind of rule."""
    built = mini.build(Config({**SIZES, **IDS}))
    trainable(built, "lora", 2, 0)
    adapters.save(built, folder, "somewhere")
    path = folder / adapters.CONFIG
    rules = {"rank_pattern": {"qkv": 2, r"mlp\.[a-z]+": 2}, "alpha_pattern": {"up": 3}, "exclude_modules": ["head"]}
    layers = {"target_modules": ["qkv", "out", "up", "down"], "layers_to_transform": [0, 1], "layers_pattern": "blocks"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **rules, **layers}))


def use_adapter(folder: Path, check: bool) -> Any:
    """What it makes of a network."""
    built = mini.build(Config({**SIZES, **IDS}))
    initialise(built.network, generator=torch.Generator().manual_seed(0), std=0.3)
    adapters.attach(built, folder, merge=False, check=check)
    adapters.attach(built, folder, merge=True, check=check)
    return built.network.state_dict()


def use_tokens(tokenizer: Tokenizer | None) -> dict[str, torch.Tensor]:
    """The ids of some texts."""
    if tokenizer is None:
        return {}
    texts = ["The cats sat on 23 mats.  <|mask|>", "caf\u00e9 <mask>"]
    ids = [*tokenizer.encode_batch(texts, add_special_tokens=True), tokenizer.encode(texts[0], parse_special=False)]
    for row in ids:
        tokenizer.decode(row)
    if tokenizer.chat_template is not None:
        ids.append(tokenizer.encode_chat("Hello <|eos|>"))
    return {f"text {number}": torch.tensor(row) for number, row in enumerate(ids)}


def use_tokenizer(folder: Path, check: bool) -> Any:
    return use_tokens(Tokenizer.from_folder(folder, vocab_size=300))


def use_circuit(folder: Path, check: bool) -> Any:
    """The tensors, and its description."""
    circuit = load_circuit(folder, check=check)
    if isinstance(circuit, HMM):
        hmm, head = (circuit.hmm, circuit.head.state_dict()) if isinstance(circuit, Modulated) else (circuit, {})
        hmm.log_prob(torch.zeros(1, hmm.length or 2, dtype=torch.long))
        return {**hmm.stored(), **head}
    return {"graph": circuit.log_prob(torch.zeros(1, circuit.length, dtype=torch.long))}


def use_jpc(folder: Path, check: bool) -> Any:
    for path in folder.glob("*.jpc"):
        HMM.from_pyjuice(path)
        found = read_jpc(path)
    return {"emission": found.emission}


def use_packed_tokens(folder: Path, check: bool) -> Any:
    """What training keeps of a text."""
    source, config = Source(kind="text", name="pins", path="constraints.txt"), PackingConfig(32, 8, 0)
    rows = load_source(source, ROOT, small_tokenizer(), config, folder).take(0, 4)
    return {name: torch.from_numpy(np.array(array)) for name, array in rows._asdict().items()}


@functools.cache
def small_tokenizer() -> Tokenizer:
    return train_bpe([README], vocab_size=300)


def use_constraint(folder: Path, check: bool) -> Any:
    """What is kept of a constraint that took long to compile."""
    cache.forget()
    automaton = Automaton(torch.tensor([[1, -1, 0], [2, 1, -1], [-1, 2, 2]]), start=0, accepting=[2])
    found = cache.compiled("a pattern", Vocabulary((b"a", b"b", b"c")), lambda: automaton)
    return {"table": found.table, "classes": found.classes, "accepting": found.accepting}


def use_logit_cache(folder: Path, check: bool) -> Any:
    """What a network said of some rows."""
    found = (LogitCache.open(folder) if any(folder.iterdir()) else small_caches.made(folder)).load()
    return {"tokens": found.tokens, "masked": found.masked, "level": found.level, "begins": found.begins}


def use_checkpoint(folder: Path, check: bool) -> Any:
    """Of a run that can go on."""
    root = folder / "checkpoints"
    if not root.exists():
        write_checkpoint(root, 7, {"weight": torch.arange(300.0), "moment": torch.ones(3, 5)}, {"seed": 1}, keep=2)
    return read_checkpoint(checkpoints(root)[-1], "cpu")[0]


Use = Callable[[Path, bool], Any]
SIDE_FILES: dict[str, Use] = {
    "packed tokens": use_packed_tokens,
    "constraint": use_constraint,
    "logit cache": use_logit_cache,
    "checkpoint": use_checkpoint,
}
"""Files that codd keeps for itself: each makes them if they are not there, and reads them."""


class Format(NamedTuple):
    """A folder, how it is made, and how it is read."""

    make: Callable[[Path], object]
    use: Use
    sealed: tuple[str, ...] = ()
    """The files whose bytes a digest speaks for, wherever they are read with ``check``."""


def copies(name: str, *files: str) -> Callable[[Path], object]:
    """A fixture, or some files of one."""

    def make(folder: Path) -> None:
        for path in FIXTURES.glob(f"{name}/*"):
            if (path.name in files) if files else not path.name.startswith("case"):
                shutil.copy(path, folder)

    return make


CIRCUIT = ("circuit.safetensors", "config.json")
FORMATS = {
    "mini": Format(save_mini, use_model, ("model.safetensors",)),
    "mini in 8 bits": Format(lambda folder: save_mini(folder, int8=True), use_model, ("model.safetensors",)),
    "llada in shards": Format(copies("llada_gqa_sharded"), use_model),
    **{name: Format(copies(name), use_model) for name in PUBLISHED if not name.endswith("_sharded")},
    "adapter": Format(save_adapter, use_adapter),
    "byte-level": Format(save_byte_level, use_tokenizer),
    "word pieces": Format(save_words, use_tokenizer),
    "unigram": Format(save_unigram, use_tokenizer),
    "hmm": Format(HMM.random(4, 7, length=3).save, use_circuit, CIRCUIT),
    "low rank": Format(HMM.random(4, 7, rank=2).save, use_circuit, CIRCUIT),
    "modulated": Format(save_modulated, use_circuit, CIRCUIT),
    "graph": Format(HMM.random(2, 3, length=3).as_circuit().save, use_circuit, CIRCUIT),
    "jpc": Format(copies("hmm", "hmm_n12.jpc"), use_jpc),
    "older jpc": Format(copies("hmm", "hmm_n12_legacy.jpc"), use_jpc),
}


@contextmanager
def little_memory() -> Iterator[None]:
    """What takes more than ROOM fails, as where there is no more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def kept(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies: on the CPU a circuit's tensors are its file, mapped."""
    return {name: x.clone() for name, x in tensors.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in found.items())


def damage(name: str, use: Use, folder: Path, sealed: tuple[str, ...], count: int) -> None:
    """Damage files of a folder, one at a time; half of them are read unchecked.

    ``use`` must refuse them by an error of ours, or make of a sealed file what it made of the whole one. Each in at
    most 2 s of the processor and `ROOM` bytes.
    """
    wanted, outcomes = kept(use(folder, True)), Counter()
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".so")  # which is in use
    for number in range(count):
        random = Random(f"{name} {number}")
        path, check = random.choice(paths), random.random() < 0.5
        whole = path.read_bytes()
        path.write_bytes(mutated(path, random))
        begun = time.process_time()
        try:
            with little_memory():
                found = use(folder, check)
        except CoddError as error:
            outcomes["refused" if len(str(error)) < 5000 else "refused at length"] += 1
        except BaseException as error:
            raise AssertionError(f"CODD_FUZZ={MUTATIONS}: number {number}, {path.name}, check={check}") from error
        else:
            equal = same(found, wanted)
            assert equal or not check or path.name not in sealed, f"{path.name} of number {number} changed in silence"
            outcomes["as saved" if equal else "usable"] += 1
        outcomes["slow"] += time.process_time() - begun > 2
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole)
    print(f"\n{name}: {dict(outcomes)}")
    assert not outcomes["refused at length"]


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_load_as_saved_or_are_refused(name, tmp_path):
    """Unchecked ones stand for digests of a stranger that fit the damage."""
    make, use, sealed = FORMATS[name]
    make(tmp_path)
    damage(name, use, tmp_path, sealed, -(-MUTATIONS // len(FORMATS)))


@pytest.mark.parametrize("name", SIDE_FILES)
def test_damaged_side_files_are_made_again_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use, _ = SIDE_FILES[name], SIDE_FILES[name](tmp_path, True)
    every = tuple({path.name for path in tmp_path.rglob("*") if path.is_file()})
    damage(name, use, tmp_path, every, -(-MUTATIONS // len(SIDE_FILES)) if MUTATIONS > 150 else 20)
