"""Loaders of training data: samples in an order, sharded over the ranks, in batches."""
