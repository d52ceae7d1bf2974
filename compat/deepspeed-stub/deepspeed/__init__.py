"""Hadal under the name of DeepSpeed."""

from hadal.compat.install import lead_to_hadal

lead_to_hadal()
