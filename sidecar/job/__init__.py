"""One job on this host: plan, layout of the directory, supervision, resume."""
