"""Models split into stages: the splits, the places of ranks, and the steps of each stage.

Arithmetic so far: an engine that trains by it is not built yet. From the bottom up: `partition.py`,
`topology.py`, `schedule.py`.
"""
