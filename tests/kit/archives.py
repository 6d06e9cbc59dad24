"""Archives that a job has uploaded."""

from __future__ import annotations

import io
import tarfile


def members(data: bytes) -> dict[str, bytes]:
    """The files of a tar.gz, by name."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = ((each.name, tar.extractfile(each)) for each in tar if each.isfile())
        return {name: file.read() for name, file in files if file is not None}
