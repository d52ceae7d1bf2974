"""Profiles of one update: operations by module, times, and the fraction of the device's peak."""

from hadal.lazy import public_names
from hadal.plugins.profiling.counting import Count as Count, Counter as Counter
from hadal.plugins.profiling.listener import ProfilerListener as ProfilerListener
from hadal.plugins.profiling.profile import Profile as Profile, Trained as Trained, Tree as Tree
from hadal.plugins.profiling.profiler import (
    FlopsProfiler as FlopsProfiler,
    get_model_profile as get_model_profile,
)

__all__ = public_names(globals())
