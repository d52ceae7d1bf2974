"""Monitors: files and services that the scalars of a training run are written to."""
