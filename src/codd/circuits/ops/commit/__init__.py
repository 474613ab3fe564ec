"""Candidates: what is known of them, and the pick of the surest one, which is then committed."""
