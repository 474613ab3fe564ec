"""What ``codd info`` says of an adapter: from adapter_config.json and the header of its file."""

import math
from pathlib import Path
from typing import Any

from codd import files
from codd.backbones import adapters, weights
from codd.cli import console
from codd.cli.info_circuit import Report
from codd.cli.info_model import check_values


def adapter(source: str) -> Report:
    """Of a folder or a hub id; FormatError if it is damaged or of a kind that codd does not read."""
    folder = files.local_folder(source, adapters.FILES)
    config, path = adapters.read_config(folder), folder / adapters.WEIGHTS
    with weights.open_safetensors(path) as file:
        headers = weights.read_headers(dict.fromkeys(file.keys(), path))
    base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
    rank, alpha = config.count("r", 8), config.number("lora_alpha", 8.0)
    numbers: dict[str, Any] = {
        "kind": "adapter",
        "folder": str(folder),
        "base": base,
        "rank": rank,
        "alpha": alpha,
        "rank_stabilised": config.flag("use_rslora", False),
        "dora": config.flag("use_dora", False),
        "target_modules": targets,
        "tensors": len(headers),
        "parameters": sum(math.prod(header.shape) for header in headers.values()),
        "bytes": path.stat().st_size,
    }
    varied = " (and others by pattern)" if config.get("rank_pattern") or config.get("alpha_pattern") else ""
    lines: dict[str, object] = {
        "kind": "adapter, " + ("DoRA" if numbers["dora"] else "LoRA"),
        "base": "not stated" if base is None else base,
        "rank": f"{rank}, alpha {alpha:g}{', rank-stabilised' if numbers['rank_stabilised'] else ''}{varied}",
        "modules": targets if isinstance(targets, str) else _brief(targets),
        "parameters": f"{numbers['parameters']:,} in {len(headers):,} tensors",
        "size": console.size(numbers["bytes"]),
        "use": f"codd.load(base, adapter={str(Path(source))!r})",
    }
    return Report(numbers, lines, check=lambda: check_values(headers))


def _brief(targets: Any, shown: int = 8) -> str:
    names = [str(name) for name in targets] if isinstance(targets, list) else []
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(sorted(names)[:shown]) + more or "not stated"
