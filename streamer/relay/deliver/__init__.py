"""How staged bytes reach the outlet in order, and what is done to them on the way."""
