"""codd: a joint output distribution for any diffusion language model."""

from codd import _threads as _threads
from codd import backbones as backbones
from codd import circuits as circuits
from codd import evaluation as evaluation
from codd.backbones import Tokenizer as Tokenizer
from codd.circuits import HMM as HMM
from codd.circuits import Circuit as Circuit
from codd.circuits import Evidence as Evidence
from codd.circuits import Modulated as Modulated
from codd.circuits import SparsePotentials as SparsePotentials
from codd.circuits import load_circuit as load_circuit
from codd.coupling import Coupled as Coupled
from codd.decoding import Model as Model
from codd.decoding import load as load
