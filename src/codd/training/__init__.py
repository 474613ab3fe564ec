"""Training of small language models, and the data they are trained on."""
