"""Messages over latents and automaton states: on the host, by Triton, and the reference."""
