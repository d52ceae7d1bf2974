"""Profiles of one update: operations by module, times, and the fraction of the device's peak."""

from hadal.plugins.profiling.counting import Count, Counter
from hadal.plugins.profiling.listener import ProfilerListener
from hadal.plugins.profiling.profile import Profile, Trained, Tree
from hadal.plugins.profiling.profiler import FlopsProfiler, get_model_profile

__all__ = [
    "Count",
    "Counter",
    "FlopsProfiler",
    "Profile",
    "ProfilerListener",
    "Trained",
    "Tree",
    "get_model_profile",
]
