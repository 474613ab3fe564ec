"""Data: sources of text, tokenized and packed sequences, noise, windows, datasets. Used by training and evaluation."""
