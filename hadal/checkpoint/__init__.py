"""Saving and loading what training needs."""
