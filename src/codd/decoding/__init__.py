"""From masks to text: the denoising loop, and the model that runs it."""

from codd.decoding.decisions import Decision as Decision
from codd.decoding.model import Generation as Generation
from codd.decoding.model import Model as Model
from codd.decoding.model import load as load
from codd.decoding.options import Options as Options
from codd.decoding.sequence import Step as Step
