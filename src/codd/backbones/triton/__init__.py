"""What stands between the matrix products of a transformer, a launch each, rounded as PyTorch rounds it.

With few rows a product takes as long as its weights take to be read, and a dozen small launches between two products
take as long again. One module an operation; this is what `codd.backbones.kernels.kernels_for` hands out.
"""

from codd.backbones.triton.attention import attend as attend
from codd.backbones.triton.attention import attends as attends
from codd.backbones.triton.attention import norm_rotate_ as norm_rotate_
from codd.backbones.triton.attention import rotate_ as rotate_
from codd.backbones.triton.cached_attention import attend_cached as attend_cached
from codd.backbones.triton.cached_attention import attends_cached as attends_cached
from codd.backbones.triton.cached_attention import store_kv as store_kv
from codd.backbones.triton.elementwise import gated_silu as gated_silu
from codd.backbones.triton.elementwise import rms_norm as rms_norm
from codd.backbones.triton.experts import mix as mix
from codd.backbones.triton.experts import route as route
from codd.backbones.triton.int8 import FEW as FEW
from codd.backbones.triton.int8 import int8_product as int8_product
from codd.backbones.triton.int8 import multiplies_int8 as multiplies_int8
from codd.backbones.triton.tiles import Tile as Tile
