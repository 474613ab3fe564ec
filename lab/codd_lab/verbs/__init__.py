"""Verbs of the command line that come with codd-lab: one module each, found by entry points."""
