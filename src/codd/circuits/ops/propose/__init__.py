"""The marginals of all tokens after a pick, and tokens that are drawn from them."""
