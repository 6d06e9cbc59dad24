"""Moves staged bytes into the outlet in order; inflates or joins them if a channel needs it."""
