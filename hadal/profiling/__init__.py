"""Profiles of one update: operations by module, times, and the fraction of the device's peak."""

from hadal.profiling.counting import Count, Counter
from hadal.profiling.listener import ProfilerListener
from hadal.profiling.profile import Profile, Trained, Tree
from hadal.profiling.profiler import FlopsProfiler, get_model_profile

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
