"""Measurements: what the joint layer costs, and (later) what it gains."""
