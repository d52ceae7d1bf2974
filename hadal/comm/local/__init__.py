"""Exchanges between CPU ranks of one host, through shared memory: accelerators never use them."""
