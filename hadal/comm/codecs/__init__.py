"""Codecs: values as bytes for the wire. Pure arithmetic; nothing is sent here."""
