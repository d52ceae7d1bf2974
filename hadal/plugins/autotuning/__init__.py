"""The search for the fastest configuration, and the measurement of an experiment.

Words of this folder.

setting      a configuration key below the top level, with a value for it
trial        one set of settings: a stage, a micro-batch, and the other settings under search
experiment   a trial run as a job of its own: a short run of the user's command
outcome      the result of an experiment: its numbers, or the reason why there are none
space        all trials of one stage
lever        a setting that a search adds: overlap, offload or recomputation
"""
