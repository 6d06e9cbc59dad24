"""The service around `streamer`: job files, supervision, admin HTTP, metrics, logs, command line.

    cli ──▶ config ──▶ supervisor ──▶ streamer.relay.Channel (one a channel)
                          │    └──▶ admin ──▶ metrics (reads the channels' statistics)
                          └──▶ runtime (directories, config files, environment of the trainer)

Modules of this package may import `streamer`; no module of `streamer` imports this package.
"""
