"""Where the bytes of a part wait between arrival and delivery: in sockets, pipes or buffers."""
