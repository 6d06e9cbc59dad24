"""Jobs that are killed and go on at other numbers of ranks, drawn from seeds: each global batch once."""
