"""Continued text: judges, measures, distances."""
