"""Data efficiency: the length of sequences and the layers that train, over the updates.

Words of this folder.

difficulty   an integer that grows during training: a length, or a value of a metric
pace         the schedule of a difficulty

A schedule is a function of the updates that were attempted (`engine.global_steps`), so that
training resumes with the right value.
"""
