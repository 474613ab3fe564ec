"""How probable true text is: the gap, continuations, and the copula as a competitor."""
