"""The user's object, and the one place that turns a configuration into policies and parts."""
