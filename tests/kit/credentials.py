"""The AWS settings of a process that runs jobs outside of a test: keys of nobody, nothing of a developer."""

from __future__ import annotations

import os

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "AKIDTEST",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


def set_credentials(access_key: str | None = None, secret_key: str | None = None) -> None:
    """Replace all AWS settings of this process by `SETTINGS`, with the keys of a server if it has its own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= SETTINGS
    if access_key is not None and secret_key is not None:
        os.environ |= {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
