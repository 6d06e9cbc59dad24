"""Real S3 servers, each with its own habits: what Penstock streams from them is compared with what was put.

    python -m tests.servers                       # every server that can be started here, over all transports
    python -m tests.servers ceph rclone           # these
    python -m tests.servers moto --check versions # one check

Not part of `make test`: Ceph comes from the distribution, s3rver from npm, others from PyPI, all at need.
`servers` starts them, `checks` are what is tried, `__main__` prints a row for each server and check.
"""
