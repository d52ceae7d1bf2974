"""Codecs: how values become bytes for the wire. Pure arithmetic; what travels is another's job."""
