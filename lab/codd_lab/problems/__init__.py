"""Multi-step word problems with written-out solutions, generated from a seed."""

from codd_lab.problems.generator import PATTERNS, generate, problems, write_problems
from codd_lab.problems.problem import Problem, extract_answer

__all__ = ["PATTERNS", "Problem", "extract_answer", "generate", "problems", "write_problems"]
