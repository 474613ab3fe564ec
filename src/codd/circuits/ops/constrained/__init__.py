"""Messages over latents and automaton states: `layout` on the host, `linear` for use, `reference` for the truth."""
