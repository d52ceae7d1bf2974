"""Checkpoints in the formats of other libraries: written from any source, and read as one."""
