"""Stepping: norm, clip, loss scale, optimizers over shards, learning-rate schedules."""
