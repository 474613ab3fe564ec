"""codd: a joint output distribution for any diffusion language model."""

from codd import circuits as circuits
from codd.circuits import HMM as HMM
from codd.circuits import Circuit as Circuit
from codd.circuits import Evidence as Evidence
from codd.circuits import SparsePotentials as SparsePotentials
