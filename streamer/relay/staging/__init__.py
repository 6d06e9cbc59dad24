"""Stages: they hold a part's bytes between arrival and delivery, in sockets, pipes or buffers."""
