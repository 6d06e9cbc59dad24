"""Finds the objects of a channel that a manifest names."""
