"""Latent paths: sampled, and the most probable one."""
