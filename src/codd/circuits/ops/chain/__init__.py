"""Messages along the chain, and the expected transitions."""
