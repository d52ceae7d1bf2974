"""The configuration: one file for each section of ds_config.json, read once and then frozen."""

from hadal.config.load import load_config, log_notes
from hadal.config.top_level import Config
from hadal.errors import Fault

__all__ = ["Config", "Fault", "load_config", "log_notes"]
