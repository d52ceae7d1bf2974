"""Optimizer steps: norm, clipping, loss scale, optimizers over shards, schedules."""
