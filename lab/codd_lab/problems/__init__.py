"""Multi-step word problems with written-out solutions, generated from a seed."""

from codd_lab.problems.generator import PATTERNS, Problem, extract_answer, generate, problems, write_problems

__all__ = ["PATTERNS", "Problem", "extract_answer", "generate", "problems", "write_problems"]
