"""Hosts and processes: what `hadal run` starts where, and how it ends."""
