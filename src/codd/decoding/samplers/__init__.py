"""From scores to ranked tokens: each position alone, through one latent path, or one token after the other."""
