"""PEFT's LoRA checkpoints for every family: merged into the weights, or kept apart and switched on and off.

The tensor ``base_model.model.M.lora_A.weight`` of an adapter changes the tensor ``M.weight`` of its base, so that the
family's key table says which rows of which parameter it changes. The rules are PEFT's: W + s B A with s = alpha / r,
or alpha / sqrt(r) if rank-stabilised; DoRA's magnitudes; whole tensors that were trained along (``modules_to_save``).
"""

import json
import os
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from codd import files
from codd.backbones import weights
from codd.backbones.backbone import Backbone
from codd.backbones.config import Config
from codd.backbones.tokenizer_files import guarded
from codd.errors import FormatError, InvalidInput

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""
A, B, MAGNITUDE, COPY = "lora_A", "lora_B", "lora_magnitude_vector", "copy"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
_WRAPPER = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
_UNREAD = set(
    """alora_invocation_tokens arrow_config kasa_config layer_replication lora_bias megatron_config monteclora_config
    target_parameters trainable_token_indices use_bdlora use_qalora velora_config""".split()  # noqa: SIM905 - shorter
)
"""Settings that make another network of an adapter than A and B do."""
_SHIFTED = ("pissa", "olora", "corda", "loftq")
"""Initialisations that change the base's weights, which PEFT does again when it loads such an adapter."""
MAX_PATTERN = 10_000
"""Characters of a regular expression."""
PATIENCE = 10
"""Seconds for all regular expressions of an adapter."""


class LowRank(nn.Module):
    """A linear layer with an addition of low rank."""

    def __init__(
        self, base: nn.Linear, down: Float[Tensor, "r i"], up: Float[Tensor, "o r"], dtype: torch.dtype | None = None
    ):
        """The layer itself stays as it is; the addition goes to its device, in ``dtype`` or that of the layer."""
        super().__init__()
        self.base = base
        device, dtype = base.weight.device, dtype or base.weight.dtype
        self.down = nn.Parameter(down.to(device, dtype), requires_grad=False)
        self.up = nn.Parameter(up.to(device, dtype), requires_grad=False)

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """The layer's output plus the addition's, in the dtype of the layer's."""
        out: Tensor = self.base(x)
        return out + linear(linear(x.to(self.down.dtype), self.down), self.up).to(out.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Add the low-rank product to the base layer's weight, in place, and return that layer."""
        self.base.weight += self.up @ self.down
        return self.base


def attach(backbone: Backbone, source: str | os.PathLike[str], *, merge: bool, check: bool = True) -> None:
    """Merge an adapter into the weights of a backbone; or keep it beside them, switched on.

    ``check`` refuses NaN and infinite values. Raises FormatError for files that are damaged, of another base or of a
    kind that codd does not read, InvalidInput for what cannot be kept apart.
    """
    folder = files.local_folder(source, FILES)
    config, path = read_config(folder), folder / WEIGHTS
    backbone.switch_adapter(False)
    with files.open_safetensors(path) as handle:
        adapter = _Adapter(path, handle, config, backbone, check)
        if merge:
            adapter.merge()
        else:
            backbone.adapter = adapter.keep_apart()
            backbone.switch_adapter(True)


def read_config(folder: Path) -> Config:
    """The adapter_config.json of a folder; FormatError if it is damaged or of a kind that codd does not read."""
    path = folder / CONFIG
    if not path.exists():
        raise FormatError(f"{path}: is missing, so that this is no adapter of PEFT. Give the folder that holds it.")
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        fix = "adapter_model.bin is a pickle, which codd does not load because it may run code: convert it"
        raise FormatError(f"{folder}: has no {WEIGHTS}. {fix if pickled else 'Download the adapter again'}.")
    config = Config(files.read_json_object(path), str(path))
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    unread = [name for name in sorted(_UNREAD) if config.get(name)]
    if isinstance(start, str) and start.lower().startswith(_SHIFTED):
        unread.append(f"init_lora_weights {start!r:.100}")
    if kind != "LORA":
        unread = [f"peft_type {kind!r:.100}"]
    if unread:
        raise FormatError(
            f"{path}: codd reads PEFT's LoRA and DoRA, but not {', '.join(unread)}. Merge the adapter into its base "
            "with peft (merge_and_unload) and load the result."
        )
    return config


class _Adapter:
    """An open adapter, for one backbone."""

    def __init__(self, path: Path, handle: Any, config: Config, backbone: Backbone, check: bool):
        self.path, self.handle, self.config, self.backbone, self.check = path, handle, config, backbone, check
        self.parameters = {name: parameter.detach() for name, parameter in backbone.network.named_parameters()}
        self.matching = 0.0
        """Seconds that regular expressions took."""

    @torch.no_grad()
    def merge(self) -> None:
        """Change the weights of the base, each in float32."""
        for name, slot, parts in self.updates():
            target = slot.part(self.parameters[slot.target])
            if COPY in parts:
                target.copy_(self._read(parts[COPY], tuple(target.shape)))
            if parts.keys() == {COPY}:
                continue
            down, up, scaling = self._factors(name, target, parts)
            weight = target.to(up.dtype) + (up @ down) * scaling
            if MAGNITUDE in parts:
                magnitude = self._read(parts[MAGNITUDE], (len(target),)).to(weight)
                weight *= (magnitude / weight.norm(dim=1))[:, None]
            target.copy_(weight)

    def keep_apart(self) -> dict[str, LowRank]:
        """The linear layers of the base with their additions: name of the module -> what takes its place."""
        layers = dict(self.backbone.network.named_modules())
        additions: dict[str, list[tuple[weights.Slot, Tensor, Tensor]]] = {}
        for name, slot, parts in self.updates():
            place = slot.target.removesuffix(".weight")
            if parts.keys() != {A, B} or not isinstance(layers.get(place), nn.Linear):
                raise InvalidInput(
                    f"{self.path}: has {_listed(parts)} for {name!r:.200}; merge=False keeps apart what LoRA adds to "
                    "linear layers, not to experts, embedding or head, and nothing else: load this adapter with "
                    "merge=True."
                )
            down, up, scaling = self._factors(name, slot.part(self.parameters[slot.target]), parts)
            additions.setdefault(place, []).append((slot, down, up * scaling))
        return {place: _joined(layers[place], parts) for place, parts in additions.items()}

    def updates(self) -> list[tuple[str, weights.Slot, dict[str, str]]]:
        """What the file holds: PEFT's names of modules, the tensors of the base, and the names of the parts by kind.

        FormatError unless all of it has its place in the base, and every low-rank part is whole.
        """
        spec, tied = self.backbone.spec, self.backbone.config.tied
        table = weights.expand_keys(spec.keys, spec.transformer)
        found: dict[str, tuple[str, weights.Slot, dict[str, str]]] = {}
        for name in sorted(self.handle.keys()):
            inner = name.removeprefix(PREFIX)
            part = _PART.fullmatch(inner)
            own = f"{part[1]}.weight" if part else _WRAPPER.sub("", inner)
            tensor = spec.rename(own)
            if inner == name or tensor not in table:
                raise self._wrong(f"{name!r:.200} is of a tensor that this base has not (or has tied to another)")
            if tied and table[tensor].target == "embedding.tokens.weight":
                raise self._wrong(f"{name!r:.200} changes an embedding that is tied to the head, but not the head")
            parts = found.setdefault(tensor, (own.rpartition(".")[0], table[tensor], {}))[2]
            if (other := parts.setdefault(part[2] if part else COPY, name)) != name:
                raise self._wrong(f"{other!r:.200} and {name!r:.200} are the same tensor")
        if not found:
            raise self._wrong("holds no tensors")
        magnitude = {MAGNITUDE} if self.config.flag("use_dora", False) else set()
        for module, _, parts in found.values():
            kinds = parts.keys() - {COPY}
            wanted = {EMBEDDING_A, EMBEDDING_B} if kinds & {EMBEDDING_A, EMBEDDING_B} else {A, B} | magnitude
            if kinds and kinds != wanted:
                raise self._wrong(f"{module!r:.200} has {_listed(kinds)}, but {CONFIG} asks for {_listed(wanted)}")
        return list(found.values())

    def _factors(self, module: str, target: Tensor, parts: dict[str, str]) -> tuple[Tensor, Tensor, float]:
        """What is added to a tensor, as two matrices (r, in) and (out, r), and the scaling of their product."""
        if target.ndim != 2:
            raise self._wrong(f"{module!r:.200} has a weight of shape {tuple(target.shape)}, no matrix")
        rows, columns = target.shape
        rank = self._setting("rank_pattern", "r", module).count("r", 8)
        alpha = self._setting("alpha_pattern", "lora_alpha", module).number("lora_alpha", 8.0)
        if EMBEDDING_A in parts:  # of the transpose
            up, down = self._read(parts[EMBEDDING_A], (rank, rows)).T, self._read(parts[EMBEDDING_B], (columns, rank)).T
        else:
            up, down = self._read(parts[B], (rows, rank)), self._read(parts[A], (rank, columns))
        dtype = torch.promote_types(target.dtype, torch.float32)
        scaling = alpha / (rank**0.5 if self.config.flag("use_rslora", False) else rank)
        return down.to(target.device, dtype), up.to(target.device, dtype), scaling

    def _setting(self, patterns: str, name: str, module: str) -> Config:
        """Where a setting stands: in the first pattern that matches a module's name or its end, or outside of them."""
        for pattern, value in (self.config.section(patterns).fields if self.config.get(patterns) else {}).items():
            if self._matches(patterns, rf"(?:.*\.)?(?:{pattern})", module):
                return Config({name: value}, f"{self.config.where} ({patterns})")
        return self.config

    def _matches(self, field: str, pattern: str, module: str) -> bool:
        """Whether a regular expression matches a module's name. A stranger's may take for ever in Python's ``re``."""
        begun = time.monotonic()
        with guarded(f"{self.config.where}: {field}", f"match {pattern!r:.100}"):
            found: bool = _whole(pattern).normalize_str(module) == ""
        self.matching += time.monotonic() - begun
        if self.matching > PATIENCE:
            raise FormatError(
                f"{self.config.where}: {field} has {pattern!r:.100} and more, which together take more than "
                f"{PATIENCE} s. Correct it or use another adapter."
            )
        return found

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        part = self.handle.get_slice(name)
        if (actual := tuple(part.get_shape())) != shape:
            raise self._wrong(f"{name} has shape {actual}, but this base and {CONFIG} ask for {shape}")
        if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise self._wrong(f"{name} is of type {part.get_dtype()}; expected floating-point weights")
        tensor: Tensor = self.handle.get_tensor(name)
        if self.check:
            weights.check_finite(f"{self.path}: {name}", tensor)
        return tensor

    def _wrong(self, why: str) -> FormatError:
        base = self.config.get("base_model_name_or_path")
        return FormatError(
            f"{self.path}: {why}. The adapter says that it was made for {base!r:.200}: load it on that "
            "base, or save or download it again."
        )


@lru_cache(maxsize=4096)
def _whole(pattern: str) -> Any:
    """What makes "" of a text that a regular expression matches whole, and gives up after ten million steps."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"more than {MAX_PATTERN} characters")
    return tokenizers.normalizers.Replace(tokenizers.Regex(rf"\A(?:{pattern})\z"), "")


def _joined(layer: nn.Module, additions: list[tuple[weights.Slot, Tensor, Tensor]]) -> LowRank:
    """A layer with the additions to its rows as one of all their ranks."""
    assert isinstance(layer, nn.Linear)
    down = torch.cat([down for _, down, _ in additions])
    up, at = down.new_zeros(layer.out_features, len(down)), 0
    for slot, _, part in additions:
        slot.part(up)[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return LowRank(layer, down, up)


def _listed(kinds: Iterable[str]) -> str:
    return " and ".join(sorted(kinds))


def save(backbone: Backbone, folder: str | os.PathLike[str], base: str) -> Path:
    """Write the low-rank layers of a backbone as an adapter that `attach` and PEFT read; ``base``: what they are for.

    A joined projection is written as the ones that it is made of: they share A, and each has its rows of B.
    """
    layers = {name: x for name, x in backbone.network.named_modules() if isinstance(x, LowRank)}
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    for name, slot in weights.expand_keys(backbone.spec.keys, backbone.spec.transformer).items():
        layer = layers.get(slot.target.removesuffix(".weight"))
        if layer is not None:
            modules.append(name.removesuffix(".weight"))
            tensors[f"{PREFIX}{modules[-1]}.{A}.weight"] = layer.down
            tensors[f"{PREFIX}{modules[-1]}.{B}.weight"] = slot.part(layer.up)
    ranks = {len(layer.down) for layer in layers.values()}
    assert len(ranks) == 1, "one rank for all layers"
    rank = ranks.pop()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    with files.replacing(Path(folder), WEIGHTS, CONFIG) as (weights_file, config):
        files.write_weights(weights_file, files.standalone(tensors), {"format": "pt"})
        stated = {"base_model_name_or_path": base, "task_type": None, "inference_mode": True, **fields}
        files.write_text(config, json.dumps(stated, indent=2) + "\n")
    return Path(folder)
