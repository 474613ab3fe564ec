"""Multi-step word problems with written-out solutions, generated from a seed."""

from codd.data.problems.generator import PATTERNS, generate, problems
from codd.data.problems.problem import Problem, extract_answer

__all__ = ["PATTERNS", "Problem", "extract_answer", "generate", "problems"]
