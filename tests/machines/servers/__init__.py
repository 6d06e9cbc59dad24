"""Real S3 servers, each with its own habits: what Penstock streams from them is compared with what was put.

`servers` starts them, `habits` asks each server where servers differ, `checks` are what is tried.
"""
