"""Measurements: what the joint layer costs, and what it gains."""

from codd.evaluation.gap import misspecification as misspecification
