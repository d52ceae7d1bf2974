"""Contestants, launcher and report of the step benchmark (``benchmarks/step.py``)."""
