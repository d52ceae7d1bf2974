"""The search for the fastest configuration, and what a training measures for it.

Words of this folder.

setting      a key below the top level of the configuration, and a value for it
trial        one set of settings: a stage, a micro-batch, and what else is varied
experiment   a trial as a job of its own: a short run of the user's command
outcome      what came of an experiment: its numbers, or why there are none
space        all trials of one stage
climb        the search for the micro-batch: upwards, while the metric gains
"""
