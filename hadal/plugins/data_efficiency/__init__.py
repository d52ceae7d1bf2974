"""Data efficiency: schedules for sequence lengths, samples, tokens and layers during training.

Words of this folder.

difficulty   an integer that grows during training: a length, or a value of a metric
pace         the schedule of a difficulty

A schedule is a function of the number of attempted updates (`engine.global_steps`), so training
resumes with the right value.
"""
