"""The engine, and the one place that turns a configuration into policies and parts."""
