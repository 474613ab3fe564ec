"""Denoisers that propose factorized logits: one bidirectional transformer, and readers of published checkpoints."""

from codd.backbones.backbone import Backbone as Backbone
from codd.backbones.backbone import SpecialTokenIds as SpecialTokenIds
from codd.backbones.loading import load_checkpoint as load_checkpoint
from codd.backbones.tokenizer import Tokenizer as Tokenizer
from codd.backbones.transformer import TransformerConfig as TransformerConfig
