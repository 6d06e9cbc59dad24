"""Model and output data of one host, which go to S3 after the trainer's end.

    check    HEAD of the final keys      absent, of an earlier run of this job and host, or refused
             a multipart upload that is aborted   proves the permission, that of the KMS key too
    upload   <base>/output/data ─▶ output.tar.gz  whatever the trainer's exit code is
             <base>/model ─▶ model.tar.gz         if that is 0

An object replaces only what `check` has seen, or what an earlier run of this job and host has written: the
metadata of every object name both. If another writer's object has the key meanwhile, the bytes go below
`OutputSpec.run`, and what is there is told. Nothing stops the other directory's upload, and no directory is
changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.process.logs import log
from sidecar.upload.archive import Archive
from sidecar.upload.spec import DATA, MODEL
from sidecar.upload.store import is_ours
from sidecar.upload.tree import LeftOut
from sidecar.upload.uploads import MOST_READS, FileChanged, Uploads
from streamer.aio import in_thread
from streamer.directory import Directory
from streamer.errors import ConfigError, Denied, PenstockError
from streamer.plan import S3Uri

if TYPE_CHECKING:
    from sidecar.upload.spec import OutputSpec
    from sidecar.upload.store import Store


class Output:
    """The final upload. Call `check` first, and `upload` once."""

    def __init__(
        self,
        base: str,
        target: OutputSpec,
        store: Store,
    ) -> None:
        """`base`: the base directory, absolute and without links. `store`: of `OutputSpec.folder`."""
        self.files = 0
        """Objects that were made."""
        self.uploaded: list[str] = []
        """Directories that are in S3, or were empty."""
        self._base = base
        self._target = target
        self._store = store
        self._seen: dict[S3Uri, str | None] = {}
        """ETags of the objects to replace; None where there was none."""

    async def check(self) -> None:
        """Find out whether the upload will be possible. Raises ConfigError, SourceError."""
        await self._store.abort_left()
        model, data = self._target.model, self._target.data
        first = model if self._target.compressed else await self._first_below(model)
        for uri in (data, first):
            if uri is not None:
                self._seen[uri] = await self._etag_to_replace(uri)
        name = self._name(model) if self._target.compressed else f"{self._name(model)}penstock"
        await self._store.prove(name, instead="Penstock.Output")

    def _name(self, uri: S3Uri) -> str:
        return uri.key.removeprefix(self._target.folder.key)

    async def _first_below(self, folder: S3Uri) -> S3Uri | None:
        """Return the first object in a folder; None if there is none, or if it may not be listed."""
        try:
            page = await self._store.send("list_objects_v2", self._name(folder), Prefix=folder.key, MaxKeys=1)
        except Denied:
            return None
        return S3Uri(folder.bucket, page["Contents"][0]["Key"]) if page.get("Contents") else None

    async def _etag_to_replace(self, uri: S3Uri) -> str | None:
        """Return the ETag of an object; None if there is none. Raises ConfigError if it must stay."""
        found = await self._store.head(self._name(uri))
        if found is None:
            return None
        if not (is_ours(found, self._store.headers) or self._target.replaces):
            metadata = found.get("Metadata", {})
            job, host = metadata.get("penstock-job"), metadata.get("penstock-host")
            raise ConfigError(
                f"{uri} exists, written by {f'job {job} on {host}' if job else 'no run of Penstock'}; choose "
                "another TrainingJobName or S3OutputPath, or set Penstock.Output.Replace: true"
            )
        return str(found["ETag"])

    async def _own(self, uri: S3Uri) -> str | None:
        """Return the ETag of an object that an earlier run of this job and host has written; else None."""
        found = await self._store.head(self._name(uri))
        if found is None or not is_ours(found, self._store.headers):
            return None
        return str(found["ETag"])

    async def upload(self, code: int) -> list[LeftOut]:
        """Upload what the trainer has left, whose exit code is `code`; return what is not at its key."""
        left: list[LeftOut] = []
        for name, uri in ((DATA, self._target.data), (MODEL, self._target.model)):
            if name == MODEL and code != 0:
                continue
            try:
                found = await self._upload(name, uri)
            except OSError as error:
                found = [LeftOut(name, f"it cannot be read ({error.strerror})")]
            except PenstockError as error:
                found = [LeftOut(name, str(error))]
            if not found:
                self.uploaded.append(name)
            left += found
        return left

    async def _upload(self, name: str, uri: S3Uri) -> list[LeftOut]:
        """Upload a directory; return what is not at its key. Raises PenstockError, OSError."""
        with await in_thread(self._opened, name) as root:
            if not await in_thread(root.names):
                if name == MODEL:
                    log.warning("the model directory is empty; no object", path=root.path)
                return []
            if name == MODEL and not self._target.compressed:
                return await self._files(uri, root)
            return await self._archive(name, uri, root)

    def _opened(self, name: str) -> Directory:
        with Directory.at(self._base) as base:
            return base.enter(*name.split("/"))

    async def _archive(self, name: str, uri: S3Uri, root: Directory) -> list[LeftOut]:
        """Upload a directory as one object; return what is not at its key."""
        left = await self._put(uri, root, self._seen.get(uri))
        if left is None and (etag := await self._own(uri)) is not None:
            left = await self._put(uri, root, etag)
        if left is not None:
            log.info("uploaded", directory=name, object=str(uri))
            return [LeftOut(f"{name}/{each.name}", each.reason) for each in left]
        aside = S3Uri(uri.bucket, f"{self._target.folder.key}{self._target.run}/{uri.key.rpartition('/')[2]}")
        if await self._put(aside, root, None) is None:
            return [LeftOut(name, f"other objects are at {uri} and at {aside}")]
        return [LeftOut(name, f"another writer's object came to {uri} meanwhile; this one is {aside}")]

    async def _put(self, uri: S3Uri, root: Directory, replaces: str | None) -> list[LeftOut] | None:
        """Write the archive of a directory; return what it lacks, None if `replaces` is not what is there.

        Raises PenstockError, OSError.
        """
        for left in reversed(range(MOST_READS)):
            archive = await in_thread(Archive, root)
            try:
                new = self._store.new(self._name(uri), archive.most, archive.read, archive.check)
                etag = await self._store.write(self._name(uri), new, replaces)
            except FileChanged:
                if not left:
                    raise
            else:
                if etag is None:
                    return None
                self.files += 1
                return archive.left_out
            finally:
                archive.close()
        raise AssertionError

    async def _files(self, folder: S3Uri, root: Directory) -> list[LeftOut]:
        """Upload the files of a directory; return what is not in S3."""
        uploads = Uploads(
            root,
            folder,
            self._store.client,
            self._store.policy,
            self._store.waiting,
            replace=self._target.replaces,
            clash="another object has its key, which no run of this job and host wrote",
            own=self._own,
            new=lambda name, file: self._store.new(
                f"model/{name}", file.status.st_size, file.read, file.check
            ),
        )
        await uploads.run()
        self.files += uploads.objects
        return uploads.left_out
