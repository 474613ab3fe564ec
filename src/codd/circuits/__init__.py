"""Probabilistic circuits, the joint prior over tokens, with exact queries. Knows nothing of language models."""

from codd.circuits.constrained import ConstrainedHMM as ConstrainedHMM
from codd.circuits.evidence import Evidence as Evidence
from codd.circuits.evidence import Kind as Kind
from codd.circuits.evidence import Modulation as Modulation
from codd.circuits.evidence import SparsePotentials as SparsePotentials
from codd.circuits.factors import Factors as Factors
from codd.circuits.graph import Circuit as Circuit
from codd.circuits.graph import leaf as leaf
from codd.circuits.graph import mixture as mixture
from codd.circuits.graph import product as product
from codd.circuits.hmm import HMM as HMM
from codd.circuits.loading import load_circuit as load_circuit
from codd.circuits.modulated import Head as Head
from codd.circuits.modulated import HeadConfig as HeadConfig
from codd.circuits.modulated import Modulated as Modulated
from codd.circuits.protocol import Conditioner as Conditioner
from codd.circuits.protocol import ProbabilisticCircuit as ProbabilisticCircuit
from codd.circuits.results import Flows as Flows
from codd.circuits.results import JointStep as JointStep
from codd.circuits.results import Samples as Samples
