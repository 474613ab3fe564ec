import hashlib
import json
import math
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import codd
from codd.backbones.loading import BUNDLED
from codd_lab.problems import extract_answer, generate

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
EASY = (4, 57, 127, 159)
"""Test problems of seed 100: two steps each, and the model solves them whatever the order of tokens."""
PARAGRAPH = (
    "The old man sat by the window and looked out at the sea. It had been raining since the morning, and the road to "
    "the village was empty. After a while his daughter came into the room with a cup of tea. She put it on the table "
    "beside him, and said that the doctor would be there before the evening. He did not answer her at once, but "
    "turned his head slowly and smiled. There was nothing to be afraid of now, he thought, and there never had been."
)


@pytest.fixture(scope="module")
def model() -> codd.Model:
    return codd.load(device="cpu")


@pytest.fixture(scope="module")
def tokenizer(model) -> codd.Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((BUNDLED / "config.json").read_text())


OFFLINE = """
import socket

class Refused(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("the network was asked for")

def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")

socket.socket, socket.create_connection, socket.getaddrinfo = Refused, refuse, refuse
try:
    socket.socket()
except AssertionError:
    pass
else:
    raise SystemExit("the network is still there")

import json, os, sys
import codd, torch

torch.set_num_threads(1)
model = codd.load(device="cpu")
ids = model.tokenizer.encode("Once upon a time there was a little") + [model.mask_id]
print(json.dumps({"ids": ids, "cwd": os.getcwd(), "found": model.backbone(torch.tensor([ids]))[0, -1].tolist()[:50]}))
"""


def test_it_loads_from_anywhere_without_network_or_home(model, tokenizer, tmp_path):
    home, place = tmp_path / "home", tmp_path / "place"
    home.mkdir()
    place.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    offline["PYTHONPATH"] = str(Path(codd.__file__).parents[1])  # this codd, if another one is installed
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OFFLINE], cwd=place, env=kept | offline, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["cwd"] == str(place.resolve())
    assert said["ids"] == [*tokenizer.encode("Once upon a time there was a little"), model.mask_id]
    here = model.backbone(torch.tensor([said["ids"]]))[0, -1, :50]
    torch.testing.assert_close(torch.tensor(said["found"]), here, rtol=1e-3, atol=1e-3)
    assert not list(home.rglob("*"))
    assert not list(place.rglob("*"))


def test_load_without_arguments_is_the_bundled_model(model):
    named = codd.load(BUNDLED, circuit=None, device="cpu")
    ids = torch.tensor([[5, 300, model.mask_id, 800]])
    assert torch.equal(model.backbone(ids), named.backbone(ids))
    assert model.circuit is None or model.circuit.vocab_size == model.backbone.vocab_size


class TestFiles:
    def test_the_digest(self, config):
        assert hashlib.sha256((BUNDLED / "model.safetensors").read_bytes()).hexdigest() == config["sha256"]

    def test_the_size(self):
        assert sum(path.stat().st_size for path in BUNDLED.iterdir() if path.is_file()) < 32e6
        assert sum(path.stat().st_size for path in BUNDLED.glob("circuit*/*")) < 12e6

    def test_rows_use_the_whole_range_of_their_integers(self, model):
        stored = load_file(BUNDLED / "model.safetensors")
        parameters = dict(model.backbone.network.named_parameters())
        matrices = {name for name, tensor in stored.items() if tensor.ndim == 2}
        assert matrices == {name.removesuffix("_scale") for name in stored if name.endswith("_scale")}
        assert len(matrices) == 1 + 4 * model.backbone.config.layers
        for name in matrices:
            whole, scale = stored[name], stored[f"{name}_scale"]
            assert whole.dtype == torch.int8
            assert scale.shape == whole.shape[:1]
            torch.testing.assert_close(parameters[name].abs().amax(dim=1), scale * 127, rtol=1e-6, atol=0)
            torch.testing.assert_close(parameters[name], whole * scale[:, None], rtol=1e-6, atol=0)


class TestNetwork:
    def test_special_ids_agree(self, model, tokenizer, config):
        special = model.backbone.special
        assert config["mask_token_id"] == special.mask == tokenizer.mask_id == model.mask_id
        assert config["eos_token_id"] == special.eos == tokenizer.eos_id
        assert config["pad_token_id"] == special.pad == tokenizer.pad_id
        assert len({special.mask, special.eos, special.pad}) == 3
        assert None not in (special.mask, special.eos, special.pad)
        assert config["vocab_size"] == model.backbone.vocab_size == tokenizer.vocab_size == 8192

    def test_it_has_read_prose(self, model, tokenizer):
        truth = torch.tensor(tokenizer.encode(PARAGRAPH))
        losses = []
        for seed in range(2):
            hidden = torch.rand(len(truth), generator=torch.Generator().manual_seed(seed)) < 0.3
            assert 20 < int(hidden.sum()) < 50
            logits = model.backbone(torch.where(hidden, model.mask_id, truth)[None])[0]
            losses.append(F.cross_entropy(logits[hidden], truth[hidden]).item())
        assert max(losses) < math.log(8192) - 5  # word frequencies alone are worth two or three nats

    def test_it_solves_problems_that_it_has_not_seen(self, model, tokenizer):
        asked = [generate(index, split="test", seed=100) for index in EASY]
        assert len({problem.pattern for problem in asked}) == len(asked)
        prompts = [tokenizer.encode_chat(problem.question) for problem in asked]
        found = model.generate(prompts, gen_length=64, threshold=0.9, sampler="factorized")
        texts = [text.strip() for text in found.texts]
        assert [extract_answer(text) for text in texts] == [problem.answer for problem in asked]
        assert all(text.count("\n") == 2 for text in texts)
        assert not any(model.mask_id in ids.tolist() for ids in found.sequences)


class TestVocabulary:
    def test_digits_stand_alone(self, tokenizer):
        numeric = []
        for id in range(tokenizer.vocab_size):
            text = tokenizer.decode([id], skip_special_tokens=False)
            if any(unicodedata.category(character).startswith("N") for character in text):
                numeric.append(text)
        assert sorted(text for text in numeric if text.isascii()) == list("0123456789")
        assert all(len(text) == 1 for text in numeric)
        assert [tokenizer.decode([id]) for id in tokenizer.encode("12 + 345")] == ["1", "2", " +", " ", "3", "4", "5"]
