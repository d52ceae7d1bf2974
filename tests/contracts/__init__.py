"""Contracts: Hadal's promises as a whole, each checked against plain torch."""
