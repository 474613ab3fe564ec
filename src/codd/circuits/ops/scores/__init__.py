"""The scores of all tokens once the latent path is known."""
