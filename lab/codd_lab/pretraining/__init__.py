"""Training backbones: the diffusion loss, and the trainer that the run loop drives."""
