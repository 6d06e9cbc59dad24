"""Moves staged bytes into the outlet in order; inflates, joins and aligns them where a channel needs it."""
