"""What a backbone is trained on: a tokenizer, a mixture of packed sequences, and some for validation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from codd.backbones.loading import BUNDLED
from codd.backbones.tokenizer import Tokenizer
from codd.data.packing import Mixture, PackedSequences
from codd.data.sources import Source, read_chunks, read_pairs
from codd.data.tokenization import PackingConfig, load_source
from codd.distributed import DistributedContext
from codd.errors import FormatError, InvalidInput
from codd.training.checkpoints import checkpoints
from codd.training.run import CHECKPOINTS
from codd_lab.pretraining.bpe import train_bpe
from codd_lab.pretraining.recipe import Recipe

ROWS = "rows of a batch: batch_rows must be a multiple of the processes"


class BackboneData(NamedTuple):
    """What a backbone is trained on."""

    tokenizer: Tokenizer
    training: Mixture
    validation: dict[str, PackedSequences]


def prepare(recipe: Recipe, root: Path, out: Path, context: DistributedContext) -> BackboneData:
    """Read, tokenize and pack; the main process first, the others then find what it kept."""
    context.shard(recipe.batch_rows, ROWS)  # an error now rather than after the work
    with context.main_first():
        tokenizer = _tokenizer(recipe, root, out, kept=not context.is_main or bool(checkpoints(out / CHECKPOINTS)))
        packing = PackingConfig(recipe.row_length, recipe.noise.block_length, recipe.seed)
        cache = out / "data"
        sources = [load_source(source, root, tokenizer, packing, cache) for source in recipe.data]
        training = Mixture(sources, [source.weight for source in recipe.data], recipe.batch_rows)
        validation = {}
        for source in recipe.validation:
            rows = load_source(source, root, tokenizer, packing, cache)
            validation[source.name] = rows.take(0, min(len(rows), source.rows or len(rows)))
    return BackboneData(tokenizer, training, validation)


def _tokenizer(recipe: Recipe, root: Path, out: Path, *, kept: bool) -> Tokenizer:
    """The recipe's, or a new one; ``kept``: the one in ``out``, which is this recipe's since checkpoints are."""
    folder = out / "tokenizer"
    path = BUNDLED if recipe.tokenizer.path == "bundled" else recipe.tokenizer.path
    found = Tokenizer.from_folder(path) if path else None
    if recipe.tokenizer.path and found is None:
        raise FormatError(f"{recipe.tokenizer.path}: there is no tokenizer in this folder (tokenizer.path).")
    found = found or (Tokenizer.from_folder(folder) if kept and folder.is_dir() else None)
    if found is None:
        sample = sample_texts(recipe.data, root, recipe.tokenizer.megabytes)
        found = train_bpe(sample, vocab_size=recipe.tokenizer.vocab_size)
        found.save(folder)
    if found.vocab_size > 2**16:
        raise InvalidInput(f"a vocabulary of {found.vocab_size} tokens; rows hold at most 65,536.")
    return found


def sample_texts(sources: Sequence[Source], root: Path, megabytes: int) -> Iterator[str]:
    """Text for training a tokenizer: of each source its share of so many megabytes, spread over all of it."""
    whole = sum(source.weight for source in sources)
    for source in sources:
        budget = int(megabytes * 1e6 * source.weight / whole)
        if source.kind == "text":
            share = min(1.0, budget / max(1, sum(len(chunk.text) for chunk in read_chunks(source, root))))
            for chunk in read_chunks(source, root):
                yield chunk.text[: int(len(chunk.text) * share)]
            continue
        for pair in read_pairs(source, root):
            text = f"{pair.question}\n{pair.answer}"
            budget -= len(text)
            if budget < 0:
                break
            yield text
