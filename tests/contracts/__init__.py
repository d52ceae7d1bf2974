"""Contracts: what Hadal promises as a whole, each checked against torch alone."""
