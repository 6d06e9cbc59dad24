"""File channels: whole objects, downloaded into directories before the trainer begins."""
