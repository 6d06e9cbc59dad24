"""Networks and limits that a test machine lacks: packet loss, delay, a link that goes down, cgroup v2.

A User-mode Linux guest (Debian's package user-mode-linux) boots in seconds over the machine's own files,
read-only. `boot` runs a command in it; `network` and `limits` set up what a scene needs inside it; `scenes`
are the scenes and their outcome: a stream is equal, or its reader is told. The guest has one processor and
a slow one, so nothing here measures speed.
"""
