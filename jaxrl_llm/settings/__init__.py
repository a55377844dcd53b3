"""Conversion of mappings to settings: schemas of settings, and functions that users name."""
