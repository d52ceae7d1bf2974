"""This file tells Hadal that the package it stands in is not DeepSpeed's own."""
