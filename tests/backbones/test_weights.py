"""Reading checkpoints: whole, one tensor at a time, or not at all, with an error that says what to do."""

import functools
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from codd.backbones import loading, mini, progress, weights
from codd.backbones.loading import load_checkpoint, read_spec
from codd.backbones.transformer import Transformer
from codd.errors import FormatError, InvalidInput
from families import SMALL, write_checkpoint
from tests.support.checkpoints import (
    FIXTURES,
    copy_of,
    edit_config,
    edit_weights,
    random_mini,
    tensors_of,
)


def refused(folder, **options) -> str:
    """The message with which a folder is refused: one line that begins with a path in it."""
    with pytest.raises(FormatError) as raised:
        load_checkpoint(folder, device="cpu", **options)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    assert len(message) < 1000
    return message


@pytest.fixture
def llada(tmp_path):
    return copy_of("llada_mha", tmp_path)


@pytest.fixture
def sharded(tmp_path):
    return copy_of("llada_gqa_sharded", tmp_path)


def edit_index(folder, change):
    path = folder / weights.INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BLOCK, HEAD = "model.transformer.blocks.", "model.transformer.ff_out.weight"


def shard_named(name: str):
    return lambda folder: edit_index(folder, lambda where: where.update({"model.transformer.wte.weight": name}))


def index_of(text: str):
    return lambda folder: (folder / weights.INDEX).write_text(text, encoding="latin-1")


def misplaced(where: dict[str, str]) -> None:
    where[next(name for name, shard in where.items() if shard == FIRST)] = SECOND


def cut(kept: int):
    def damage(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])

    return damage


def doubled(folder) -> None:
    tensor = tensors_of(folder)["backbone.vocab_embed.embedding"]
    edit_weights(folder, **{"vocab_embed.embedding": tensor})


def pickled(folder) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def configured(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


DAMAGED = [
    ("llada_gqa_sharded", lambda folder: (folder / SECOND).unlink(), f"'{SECOND}', which is missing. Download the"),
    ("llada_gqa_sharded", shard_named("../elsewhere.safetensors"), "outside its folder"),
    ("llada_gqa_sharded", shard_named("/etc/passwd"), "outside its folder"),
    ("llada_gqa_sharded", shard_named("sub/model.safetensors"), "outside its folder"),
    ("llada_gqa_sharded", shard_named(".."), "is missing"),
    ("llada_gqa_sharded", shard_named(""), "outside its folder"),
    *(("llada_gqa_sharded", shard_named(name), "which is missing") for name in ("x" * 5000, "a\0b", "🦀" * 1000)),
    ("llada_gqa_sharded", lambda folder: edit_index(folder, misplaced), f"which {weights.INDEX} says it holds. Down"),
    ("llada_gqa_sharded", index_of(""), "is not JSON"),
    ("llada_gqa_sharded", index_of("[" * 100_000), "is not JSON"),
    ("llada_gqa_sharded", index_of("\0\xff"), "is not UTF-8 text"),
    ("llada_gqa_sharded", index_of("[1]"), "expected a JSON object, found list"),
    *(
        ("llada_gqa_sharded", index_of(text), "is not an index of shards")
        for text in ("{}", '{"weight_map": 3}', '{"weight_map": [1]}')
    ),
    *(
        ("llada_mha", cut(kept), "model.safetensors: is truncated, damaged or not a safetensors file")
        for kept in (0, 4, 8, 100, 3_000, -1)
    ),
    (
        "llada_mha",
        lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(200)),
        "not a safetensors file",
    ),
    (
        "llada_mha",
        lambda folder: edit_weights(folder, **{"model.transformer.ln_f.weight": torch.ones(65)}),
        "model.transformer.ln_f.weight has shape (65,), but config.json says (64,)",
    ),
    (
        "llada_mha",
        lambda folder: edit_weights(folder, drop=(BLOCK + "1.ff_out.weight",)),
        f"lacks '{BLOCK}1.ff_out.weight'. Its config.json describes another network",
    ),
    (
        "llada_mha",
        lambda folder: edit_weights(folder, **{BLOCK + "0.q_norm\nweight": torch.ones(3)}),
        "q_norm\\nweight', which this family does not use",
    ),
    ("llada_mha", lambda folder: edit_config(folder, n_layers=2), " and 5 more, which this family does not use."),
    ("llada_mha", lambda folder: edit_config(folder, n_layers=9_999), "states 9,999 layers, but there are only 30 ten"),
    (
        "llada2_moe",
        lambda folder: edit_config(folder, num_experts=2_000_000),
        "config.json states 4,000,000 experts, but there are only 130 tensors. Download both again",
    ),
    (
        "llada2_moe",
        lambda folder: edit_config(folder, hidden_size=2**28, moe_intermediate_size=2**28),
        "no network has the sizes in config.json (RuntimeError: Storage size",
    ),
    *(
        ("fastdllm_v2", lambda folder, wrong=wrong: edit_config(folder, **wrong), "must be a list of names, found ")
        for wrong in ({"architectures": -1}, {"layer_types": 5}, {"layer_types": [5]}, {"architectures": 0.5})
    ),
    ("mdlm", doubled, "'backbone.vocab_embed.embedding', 'vocab_embed.embedding' are the same tensor"),
    (
        "llada_mha",
        lambda folder: edit_weights(folder, **{HEAD: torch.zeros(160, 64, dtype=torch.int8)}),
        f"{HEAD}_scale with one number for each of its rows is missing",
    ),
    (
        "llada_mha",
        lambda folder: edit_weights(folder, **{HEAD: torch.zeros(160, 64, dtype=torch.int32)}),
        "is of type I32; expected floating-point weights",
    ),
    (
        "llada_mha",
        lambda folder: (folder / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index.json. Download",
    ),
    ("llada_mha", pickled, "pytorch_model.bin is a pickle, which codd does not load because it may run code: convert"),
    ("llada_mha", lambda folder: (folder / "config.json").unlink(), "config.json: is missing"),
    *(
        ("llada_mha", configured(text), "config.json: is not JSON")
        for text in ("", "{", "[" * 100_000, "\0", '{"model_type": "llada"')
    ),
    ("llada_mha", configured("[1]"), "expected a JSON object, found list"),
    ("llada_mha", configured('{"a": ' * 400 + "1" + "}" * 400), "is nested more than 64 deep"),
    ("llada_mha", configured('{"a": ' + "[" * 400 + "]" * 400 + "}"), "is nested more than 64 deep"),
    (
        "llada_mha",
        lambda folder: os.truncate(folder / "config.json", 1 << 40),  # it takes no room on the disk
        "config.json: has 1,099,511,627,776 bytes, more than the 16,777,216",
    ),
    (
        "llada_mha",
        lambda folder: edit_config(folder, model_type="gpt2", architectures=[], auto_map={}),
        "model_type 'gpt2' is of no family that codd knows; use one of llada, llada_moe, llada2, illada, dream, a2d,",
    ),
    *(
        ("llada_mha", lambda folder, change=change: edit_config(folder, **{"n_kv_heads": None, **change}), wanted)
        for wanted, changes in {
            "config.json: n_heads must be a whole number": [{"n_heads": "4"}, {"n_heads": 4.0}],
            "n_layers must be a whole number": [{"n_layers": True}, {"n_layers": 0}, {"n_layers": -3}],
            "from 1 to 10000": [{"n_layers": 10**9}],
            "d_model must be a whole number": [{"d_model": 10**30}, {"d_model": [64] * 10_000}, {"d_model": None}],
            "rope_theta must be a number above zero": [{"rope_theta": x} for x in ("big", float("nan"), 10**400)],
            "rms_norm_eps must be a number above zero": [{"rms_norm_eps": -1e-5}],
            "weight_tying must be true or false": [{"weight_tying": "no"}],
            "mask_token_id must be the id of a token": [{"mask_token_id": -1}, {"mask_token_id": 1.5}],
            "mask id 160 is not in the vocabulary of 160": [{"mask_token_id": 160}],
            "do not divide a width of 64": [{"n_heads": 5}, {"n_kv_heads": 3}],
            "heads of even width, found 1": [{"n_heads": 64}],
        }.items()
        for change in changes
    ),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGED, ids=[str(i) for i in range(len(DAMAGED))])
def test_damaged_checkpoints_are_refused(name, damage, words, tmp_path):
    folder = copy_of(name, tmp_path)
    damage(folder)
    assert words in refused(folder)


def test_shards_that_are_links_are_followed(sharded, tmp_path):
    """The hub's cache keeps its files elsewhere."""
    blob = tmp_path / "blob"
    (sharded / FIRST).rename(blob)
    (sharded / FIRST).symlink_to(blob)
    assert load_checkpoint(sharded, device="cpu").backbone.family == "llada"


def test_a_wrong_shape_is_found_before_memory_is_taken(llada, monkeypatch):
    edit_config(llada, vocab_size=2**28, embedding_size=2**28, d_model=2**20)
    monkeypatch.setattr(Transformer, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    assert "has shape" in refused(llada)


def test_values_that_are_not_finite(llada):
    name = "model.transformer.blocks.2.up_proj.weight"
    for wrong in (float("nan"), float("inf")):
        tensor = tensors_of(llada)[name]
        tensor[3, 5] = wrong
        edit_weights(llada, **{name: tensor})
        assert f"{name} has NaN or infinite values" in refused(llada)
        load_checkpoint(llada, device="cpu", check=False)


def test_a_flipped_bit_is_noticed_by_the_stated_digest(tmp_path):
    folder = mini.save(random_mini(), tmp_path)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "model.safetensors: is damaged: its sha256 is not the one that config.json states" in refused(folder)
    load_checkpoint(folder, device="cpu", check=False)
    edit_config(folder, sha256=None)
    load_checkpoint(folder, device="cpu")


READ_ALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from codd.backbones import load_checkpoint
from codd.errors import FormatError
for folder in sys.argv[1:]:
    try:
        load_checkpoint(folder, device="cpu")
    except FormatError as error:
        print(error)
"""


def test_what_is_no_regular_file_is_not_read(tmp_path):
    """A pipe that nobody writes to would be waited for, and /dev/zero would be read until the memory is full."""
    makers = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}
    folders = []
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for kind, make in makers.items():
            folders.append(copy_of("llada_mha", tmp_path / name / kind))
            if name == "chat_template.jinja":
                shutil.copy(loading.BUNDLED / "tokenizer.json", folders[-1])
            (folders[-1] / name).unlink(missing_ok=True)
            make(folders[-1] / name)
    command = [sys.executable, "-c", READ_ALL, *map(str, folders)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.splitlines()
    assert len(said) == len(folders)
    for line, folder in zip(said, folders, strict=True):
        assert line.startswith(str(folder))
        assert "cannot be read: it is no regular file" in line or "has neither model.safetensors" in line


def test_folders_that_are_not_there(tmp_path):
    assert "there is no such folder" in refused(tmp_path / "nothing")
    with pytest.raises(FormatError, match="cannot be looked at") as raised:
        load_checkpoint("x" * 5000)
    assert len(str(raised.value)) < 1000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("patience", "stream", "seen"), [(0, Terminal, True), (60, Terminal, False), (0, io.StringIO, False)]
)
def test_a_progress_bar_on_a_terminal_if_it_takes_long(patience, stream, seen, llada, monkeypatch):
    written = stream()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    load_checkpoint(llada, device="cpu")
    assert ("loading the weights" in written.getvalue()) is seen
    written.truncate(0)
    weights.check_values(loading.match(llada, read_spec(llada)).headers)
    assert ("reading the weights" in written.getvalue()) is seen


PEAK = """
import re, sys
import torch
from codd.backbones import load_checkpoint

def load(folder):
    load_checkpoint(folder, device="cpu", dtype=torch.float16)
    with open("/proc/self/status") as file:
        sizes = dict(re.findall(r"(\\w+):\\s+(\\d+) kB", file.read()))
    return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024

before, _ = load(sys.argv[1])  # what is imported with the first one is no part of it
print(load(sys.argv[2])[1] - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_the_memory_that_loading_takes(tmp_path):
    """The network, a file, and little else: pages of files that were read before are given back."""
    fields = {**SMALL["llada2"], "hidden_size": 256, "num_hidden_layers": 7, "num_experts": 24}
    size = write_checkpoint(tmp_path, {**fields, "moe_intermediate_size": 256}, shards=6, dtype=torch.float16)
    command = [sys.executable, "-c", PEAK, FIXTURES / "llada2_moe", tmp_path]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert size > 50e6
    assert size * 0.9 < int(found.stdout) < size * (1 + 1 / 6) + 16e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_dtype_and_device(dtype):
    net = load_checkpoint(FIXTURES / "llada_gqa_sharded", device=torch.device("cpu"), dtype=dtype).backbone
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    assert net.dtype == dtype
    assert net.device == torch.device("cpu")
    assert not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_wrong_dtypes_and_devices():
    with pytest.raises(InvalidInput, match="floating-point"):
        load_checkpoint(FIXTURES / "llada_mha", device="cpu", dtype=torch.int8)
    with pytest.raises(InvalidInput, match="there is no device 'abacus'"):
        load_checkpoint(FIXTURES / "llada_mha", device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="no CUDA device"):
            load_checkpoint(FIXTURES / "llada_mha", device="cuda")


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
    ],
)
def test_stored_dtype(tmp_path, dtype, found):
    save_file({"embedding": torch.zeros(3, 2, dtype=dtype)}, tmp_path / "model.safetensors")
    slots = {"embedding": weights.Slot("embedding.tokens.weight", None)}
    assert weights.stored_dtype(weights.checkpoint_headers(tmp_path), slots) == found


def survival(*results: bool):
    """A stand-in for the trial product: what it finds at each try."""
    left = list(results)
    return functools.cache(lambda: left.pop(0))


@pytest.mark.parametrize(
    ("found", "limit"), [((True,), ""), ((False, True), "AVX512_CORE_BF16"), ((False, False), None)]
)
def test_bfloat16_where_it_works_with_a_limit_or_never(found, limit, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # so that what is set in the test is undone after it
    monkeypatch.setattr(loading, "_bfloat16_survives", survival(*found))
    for _ in range(2):  # tried once
        if limit is None:
            with pytest.raises(InvalidInput, match=r"load the model with dtype=torch\.float32"):
                loading.check_dtype(torch.bfloat16, torch.device("cpu"))
        else:
            loading.check_dtype(torch.bfloat16, torch.device("cpu"))
            assert os.environ["ONEDNN_MAX_CPU_ISA"] == limit
    loading.check_dtype(torch.float32, torch.device("cpu"))
    loading.check_dtype(torch.bfloat16, torch.device("cuda"))


def test_mini_is_written_and_read(tmp_path):
    net = random_mini()
    loaded = load_checkpoint(mini.save(net, tmp_path / "mini", notes={"about": "a test"}), device="cpu").backbone
    assert loaded.config == net.config
    assert loaded.special == net.special
    for name, parameter in net.network.named_parameters():
        assert torch.equal(dict(loaded.network.named_parameters())[name], parameter)
    assert json.loads((tmp_path / "mini" / "config.json").read_text())["about"] == "a test"
    assert sorted(path.name for path in (tmp_path / "mini").iterdir()) == ["config.json", "model.safetensors"]


def test_mini_in_8_bit_integers(tmp_path):
    """Rounding to the nearest of 255 values is off by half a step at most, and a row's step is its maximum / 127."""
    net = random_mini()
    with torch.no_grad():
        net.network.embedding.tokens.weight[4] = 0  # a row without a scale of its own
    folder = mini.save(net, tmp_path / "mini", int8=True)
    stored = tensors_of(folder)
    assert stored["blocks.0.mlp.up.weight"].dtype == torch.int8
    loaded = dict(load_checkpoint(folder, device="cpu", check=True).backbone.network.named_parameters())
    for name, parameter in net.network.named_parameters():
        if parameter.ndim == 2:
            step = parameter.abs().amax(dim=1, keepdim=True) / 127
            assert bool(((loaded[name] - parameter).abs() <= step / 2 * (1 + 1e-5)).all())
        else:
            assert torch.equal(loaded[name], parameter)
    assert (folder / "model.safetensors").stat().st_size < sum(p.numel() * 4 for p in net.parameters()) / 2.5


def test_8_bit_integers_with_scales_of_another_shape(tmp_path):
    folder = mini.save(random_mini(), tmp_path / "mini", int8=True)
    edit_weights(folder, **{"blocks.0.mlp.up.weight_scale": torch.ones(3)})
    assert "blocks.0.mlp.up.weight is of 8-bit integers" in refused(folder)


def test_a_table_that_leaves_something_empty_is_our_own_mistake(llada):
    spec = read_spec(llada)
    network = Transformer(spec.transformer)
    table = weights.expand_keys(spec.keys[1:], spec.transformer)
    with pytest.raises(AssertionError, match="leaves parameters empty"):
        weights.load(network, weights.checkpoint_headers(llada), table)
