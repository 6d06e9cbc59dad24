"""Moves staged bytes into the outlet in order; inflates, joins and aligns them if a channel needs it."""
