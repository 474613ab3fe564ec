"""Leaf values: what the evidence says about each latent state, and the way back to the tokens."""
