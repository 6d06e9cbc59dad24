"""The process itself: event loop, signals, exit codes, logs, standard streams, memory."""
