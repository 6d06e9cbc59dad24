"""Reads the files of AWS clients before botocore does, which reads them in the event loop.

    variable or profile ── path ──▶ streamer.file_reads ── secret ──▶ streamer.secrets
                                          │ FIFO, or not read in time
                                          └──▶ Denied, which names the file

botocore reads them when it resolves the credentials and each time that it renews them. A FIFO, or a mount
that does not respond, would stop every stream then. So `AwsFiles.check` reads each file first, in a thread,
and botocore follows when all could be read. A file that does not exist is left to botocore.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from hashlib import sha1, sha256
from typing import Any

from streamer.errors import Denied
from streamer.file_reads import OutsideCall, ended, read_here
from streamer.secrets import remember

TOKEN_FILES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
"""Variables that name a file with a secret."""
_LONGEST_FILE = 1024 * 1024


def token_files(session: Any, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of the token files that the environment and a botocore session's profile name.

    The profile may build upon others (`source_profile`). A login's token is in a file of its name's hash.
    """
    files = {name: path for name in TOKEN_FILES if (path := environment.get(name))}
    profiles = session.full_config.get("profiles", {})
    name: Any = session.get_config_variable("profile") or "default"
    for _ in range(len(profiles)):
        profile = profiles.get(name, {})
        if path := profile.get("web_identity_token_file"):
            files[f"web_identity_token_file of profile {name}"] = path
        for key, folder, hashed in (
            ("sso_start_url", "~/.aws/sso/cache", sha1),
            ("sso_session", "~/.aws/sso/cache", sha1),
            ("login_session", environment.get("AWS_LOGIN_CACHE_DIRECTORY", "~/.aws/login/cache"), sha256),
        ):
            if value := profile.get(key):
                path = os.path.join(folder, f"{hashed(value.encode()).hexdigest()}.json")
                files[f"{key} of profile {name}"] = os.path.expanduser(os.path.expandvars(path))
        name = profile.get("source_profile")
    return files


def legacy_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of the files of older clients, by what names them."""
    files = {"AWS_CREDENTIAL_FILE": path} if (path := environment.get("AWS_CREDENTIAL_FILE")) else {}
    if (path := environment.get("BOTO_CONFIG")) is not None:
        files["BOTO_CONFIG"] = path
    else:
        files |= {f"boto's {path}": path for path in ("/etc/boto.cfg", "~/.boto")}
    return {name: os.path.expanduser(path) for name, path in files.items()}


class AwsFiles:
    """The files of one session."""

    def __init__(self, paths: Mapping[str, str], secrets: Mapping[str, str], *, seconds: float) -> None:
        """`paths`, and of files that contain a secret, by what names them. `seconds`: limit for each."""
        self._paths = {**paths, **secrets}
        self._secrets = secrets
        self._seconds = seconds
        self._running: dict[str, OutsideCall[bytes]] = {}
        """By path, a read that has not ended: the next check waits for the same, and starts no thread."""

    async def check(self) -> None:
        """Read all files and `remember` the secrets in them. Raises Denied."""
        for name, path in self._paths.items():
            running = self._running.get(path)
            if running is None:
                running = OutsideCall(partial(read_here, path, _LONGEST_FILE, again=True))
                self._running[path] = running
            try:
                content = await ended(running, self._seconds)
            except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError, ValueError):
                continue
            except OSError as error:
                raise Denied(
                    f"cannot read {path} ({name}): {error.strerror}; correct the path, or do without {name}"
                ) from error
            finally:
                if running.ended:
                    self._running.pop(path, None)
            if name in self._secrets:
                remember(content.strip())
