"""Bugs to plant: each one a small textual patch, and the tests that stand nearest to it.

A patch replaces `old`, which the file holds once, by `new`. `tests` are in order of cost: those of the
module, then those of what uses it. Beyond them every plant meets the machines of `checkers`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plant:
    """One bug."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def planted(self, text: str) -> str:
        """`text` with the bug. Raises ValueError unless it holds `old` once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} holds {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


FAULTS, EPOCHS = "tests/relay/test_faults.py", "tests/relay/test_epochs.py"
WRONG = f"{FAULTS}::test_a_wrong_answer_is_an_error_or_right"
VERSION = f"{FAULTS}::test_every_range_names_the_listed_version"
IN_ORDER = f"{EPOCHS}::test_two_epochs_are_the_objects_in_order"
BODIES, DEALING = "tests/relay/test_part_bodies.py", "tests/unit/test_dealing.py"
RECORDS = "tests/unit/test_record_order.py"
PLAN, ARRANGED = "tests/unit/test_plan.py", "tests/unit/test_arrangement.py"

PLANTS = (
    # S3: which version, which bytes, who hears of it
    Plant(
        "If-Match dropped by our own client",
        "streamer/s3/signing/requests.py",
        "if sends_if_match else {}",
        "if not sends_if_match else {}",
        ("tests/unit/test_sigv4.py", VERSION),
    ),
    Plant(
        "If-Match dropped by aiobotocore",
        "streamer/s3/aiobotocore_source.py",
        "if sends_if_match else {}",
        "if not sends_if_match else {}",
        (VERSION,),
    ),
    Plant(
        "Range asks for one byte too few",
        "streamer/s3/signing/requests.py",
        '{"Range": f"bytes={first}-{end - 1}"}',
        '{"Range": f"bytes={first}-{end - 2}"}',
        ("tests/unit/test_sigv4.py", IN_ORDER),
    ),
    Plant(
        "ETag of an answer not compared",
        "streamer/s3/ranges.py",
        "elif found != ref.etag:",
        "elif by_time and found != ref.etag:",
        (WRONG,),
    ),
    Plant(
        "Last-Modified of an answer not compared",
        "streamer/s3/ranges.py",
        "elif found != ref.etag:",
        "elif not by_time and found != ref.etag:",
        ("tests/relay/test_modified.py",),
    ),
    Plant(
        "answer without an ETag accepted",
        "streamer/s3/ranges.py",
        "if not proven:",
        "if proven:",
        (WRONG, "tests/relay/test_versions.py"),
    ),
    Plant(
        "end of Content-Range not compared",
        "streamer/s3/ranges.py",
        "if (begin, last + 1) != (first, end):",
        "if begin != first:",
        (WRONG,),
    ),
    Plant(
        "size in Content-Range not compared",
        "streamer/s3/ranges.py",
        "if size != ref.size:",
        "if size < 0:",
        (WRONG,),
    ),
    Plant(
        "redirect followed",
        "streamer/s3/client/redirects.py",
        "allow_redirects=False",
        "allow_redirects=True",
        ("tests/relay/test_redirects.py",),
    ),
    Plant(
        "secret not redacted in base64",
        "streamer/secrets.py",
        "base64.b64encode(raw).decode(), raw.hex()",
        "raw.hex(),",
        ("tests/unit/test_secrets.py", "tests/sidecar/test_security.py"),
    ),
    Plant(
        "short body taken for whole",
        "streamer/s3/http/body.py",
        "raise self._fail(Truncated(f\"the body ended {counted(self.left, 'byte')} early\", self._context))",
        "count = self.left",
        (f"{FAULTS}::test_a_broken_body_resumes_at_the_next_byte",),
    ),
    Plant(
        "stall never noticed",
        "streamer/s3/http/body.py",
        "elif silent + PATIENCE >= self._stall_timeout:",
        "elif silent < 0:",
        ("tests/relay/test_held.py", "tests/relay/test_waits.py"),
    ),
    Plant(
        "listing in the server's order",
        "streamer/s3/pages/listing.py",
        "    ordered = entries.in_key_order()",
        "    ordered = entries",
        (PLAN, "tests/relay/test_listing.py"),
    ),
    Plant(
        "listing that repeats a page accepted",
        "streamer/s3/pages/prefix_pages.py",
        "            if name in self._seen:\n",
        "            if name in self._seen and not names:\n",
        ("tests/relay/test_listing.py",),
    ),
    Plant(
        "ranges of a listing joined without proof that they meet",
        "streamer/s3/pages/range_lister.py",
        "        if not listing.refused and listing.keys.first == before.keys.next:\n",
        "        if not listing.refused:\n",
        ("tests/unit/test_range_lister.py",),
    ),
    # The plan
    Plant(
        "resume off by one within a segment",
        "streamer/plan/parts.py",
        "yield Segment(item.object, item.start + skip, item.end)",
        "yield Segment(item.object, min(item.start + skip + 1, item.end), item.end)",
        ("tests/unit/test_resume.py",),
    ),
    Plant(
        "literals after a range put before it",
        "streamer/plan/parts.py",
        "items.append(step)",
        "items.insert(0, step)",
        (ARRANGED, PLAN),
    ),
    Plant(
        "shards of ranks off by one",
        "streamer/plan/shuffle.py",
        "Shard(self.index + self.count * index, self.count * count, self.by)",
        "Shard((self.index + self.count * index + 1) % (self.count * count), self.count * count, self.by)",
        (ARRANGED, "tests/sidecar/test_ranks.py"),
    ),
    Plant(
        "the same order in every epoch",
        "streamer/plan/plan.py",
        "Permutation(count, seed=self.seed, epoch=epoch)",
        "Permutation(count, seed=self.seed, epoch=0)",
        (ARRANGED,),
    ),
    Plant(
        "digest without versions",
        "streamer/plan/digest.py",
        'version = f", {quoted(item.version)}" if item.version else ""',
        'version = ""',
        (PLAN, ARRANGED),
    ),
    Plant(
        "padding of records wrong",
        "streamer/formats/recordio.py",
        'return b"\\0" * (-length % 4)',
        'return b"\\0" * (4 - length % 4)',
        ("tests/unit/test_formats.py",),
    ),
    # The relay
    Plant(
        "room of abandoned parts leaks",
        "streamer/schedule/window.py",
        """            slot = self._slots.popleft()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        self._abandoned""",
        """            slot = self._slots.popleft()
            self.landed(slot)
            dropped.append(slot)
        self._abandoned""",
        ("tests/unit/test_window.py",),
    ),
    Plant(
        "requests of abandoned parts leak",
        "streamer/schedule/window.py",
        """            slot = self._slots.popleft()
            self._gone(slot)
            self.landed(slot)
            dropped.append(slot)
        self._abandoned""",
        """            slot = self._slots.popleft()
            self._gone(slot)
            dropped.append(slot)
        self._abandoned""",
        ("tests/unit/test_window.py",),
    ),
    Plant(
        "a later epoch takes all the room",
        "streamer/schedule/window.py",
        "max(self.quota.byte_limit // 4, reserved_bytes)",
        "max(self.quota.byte_limit, reserved_bytes)",
        ("tests/unit/test_window.py",),
    ),
    Plant(
        "freed room wakes nobody",
        "streamer/schedule/budget.py",
        """            self._whole.returned(self)""",
        """            pass""",
        ("tests/unit/test_budget.py", "tests/relay/test_sharing.py"),
    ),
    Plant(
        "arriving bytes wake nobody",
        "streamer/relay/staging/stage.py",
        """            self.awaited = False
            self._on_change()""",
        """            self.awaited = False
            if self.error is not None:
                self._on_change()""",
        (IN_ORDER,),
    ),
    Plant(
        "wrong answers counted over progress",
        "streamer/retry.py",
        "self.since, self.failures, self._wrong = time.monotonic() - silent, 0, 0",
        "self.since, self.failures = time.monotonic() - silent, 0",
        ("tests/unit/test_retry.py", f"{FAULTS}::test_progress_forgets_wrong_answers"),
    ),
    Plant(
        "progress does not restart GiveUpAfter",
        "streamer/retry.py",
        "self.since, self.failures, self._wrong = time.monotonic() - silent, 0, 0",
        "self.failures, self._wrong = 0, 0",
        ("tests/unit/test_retry.py", f"{FAULTS}::test_progress_restarts_the_clock"),
    ),
    Plant(
        "SlowDown not heeded",
        "streamer/schedule/concurrency.py",
        "self.limit = max(1, self.limit // 2)",
        "self.limit = max(1, self.limit)",
        ("tests/unit/test_concurrency.py",),
    ),
    Plant(
        "bytes in doubt passed on unless the next response goes on with others",
        "streamer/s3/client/doubt.py",
        "if not self.doubted.endswith(again):",
        "if not self.doubted.startswith(again[:1], len(self.doubted) - len(again)):",
        ("tests/unit/test_doubt.py",),
    ),
    Plant(
        "hedged bytes delivered twice",
        "streamer/relay/fetch/successor.py",
        "while surplus := stage.received - self._at:",
        "while surplus := 0:",
        ("tests/unit/test_hedge.py", "tests/relay/test_hedges.py"),
    ),
    Plant(
        "thrown away bytes of hedges not counted",
        "streamer/relay/fetch/hedger.py",
        "counters.wasted_bytes += hedge.thrown_away",
        "counters.wasted_bytes += 0",
        ("tests/relay/test_hedges.py",),
    ),
    Plant(
        "border between gzip members lost",
        "streamer/inflate.py",
        "            self._used -= len(member.unused_data)\n",
        "",
        ("tests/unit/test_inflate.py",),
    ),
    Plant(
        "cut gzip taken for whole",
        "streamer/inflate.py",
        "if self._member is not None or self._header:",
        "if self._header:",
        ("tests/unit/test_inflate.py",),
    ),
    Plant(
        "bytes before a restart delivered again",
        "streamer/relay/deliver/delivery.py",
        "again=self.delivered - self._start(epoch).mark.streamed",
        "again=0",
        ("tests/relay/test_joined.py", "tests/relay/test_inflated.py"),
    ),
    Plant(
        "the end of a listing missed after a turn",
        "streamer/relay/deliver/delivery.py",
        "                continue  # the listing may have ended, which `_wait` would not hear of any more\n",
        "",
        ("tests/relay/test_open_plans.py",),
    ),
    Plant(
        "trailer written early",
        "streamer/relay/epoch_runner.py",
        "                await self._delivery.deliver(epoch, outlet, keys)\n",
        '                self._fifos.publish(self._trailer("complete"))\n'
        "                await self._delivery.deliver(epoch, outlet, keys)\n",
        (f"{EPOCHS}::test_the_trailer_says_open_until_the_last_byte",),
    ),
    Plant(
        "trailer counts bytes that the FIFO never had",
        "streamer/relay/epoch_trailers.py",
        "bytes_delivered=max(0, delivered - opening.bytes_skipped)",
        "bytes_delivered=max(0, delivered)",
        ("tests/relay/test_joined.py::test_an_epoch_goes_on_at_the_exact_byte",),
    ),
    Plant(
        "held FIFO of a failed epoch reported as closed",
        "streamer/relay/channel_state.py",
        'when_failed == "close" and reader_came and not local',
        'not reader_came or (when_failed == "close" and not local)',
        ("tests/sidecar/test_keeper.py::test_a_changed_plan_fails_by_name_and_the_fifo_stays_open",),
    ),
    # Checksums
    Plant(
        "checksum begun anew at each part",
        "streamer/relay/staging/taps.py",
        "if each.start == 0:",
        "if each.start >= 0:",
        ("tests/relay/test_integrity.py",),
    ),
    Plant(
        "checksum compared and ignored",
        "streamer/relay/staging/taps.py",
        "elif value == stored.value:",
        "elif value == stored.value or ref.size:",
        ("tests/relay/test_integrity.py",),
    ),
    # FIFOs and the keeper
    Plant(
        "FIFO closed before it is unlinked",
        "streamer/relay/epoch_runner.py",
        "            self._fifos.conclude(trailer, successor=successor)\n",
        "            if outlet is not None:\n                outlet.close()\n"
        "            self._fifos.conclude(trailer, successor=successor)\n",
        (
            "tests/unit/test_fifo_directory.py",
            f"{EPOCHS}::test_next_fifo_is_there_and_this_one_gone_before_the_end_of_file",
        ),
    ),
    Plant(
        "write end closed twice",
        "streamer/sink/outlet.py",
        "            os.close(self.detach())",
        "            fd = self.detach()\n            os.close(fd)\n"
        "            self._loop.call_soon(os.close, fd)",
        (IN_ORDER,),
    ),
    Plant(
        "departure of a reader not noticed",
        "streamer/sink/outlet.py",
        "        self._on_gone()\n",
        "",
        (f"{EPOCHS}::test_early_close_is_noticed_while_storage_is_silent",),
    ),
    Plant(
        "keeper forgets what is in its pipe",
        "streamer/helpers/keeper/channel.py",
        "return self.moved + (bytes_unread(self.read_fd) if self.fifo >= 0 else 0)",
        "return self.moved",
        ("tests/sidecar/test_keeper_faults.py::test_the_next_sidecar_is_told_of_bytes_in_the_pipe",),
    ),
    Plant(
        "resume under another plan",
        "sidecar/job/resume.py",
        "if not anyway and not covered:",
        "if not anyway and not held.digest:",
        ("tests/unit/test_resume.py", "tests/sidecar/test_keeper.py"),
    ),
    # Readers
    Plant(
        "reader ignores the trailer's state",
        "streamer/readers/core/proof.py",
        'if trailer.state != "complete" or trailer.bytes_delivered != received:',
        "if trailer.bytes_delivered != received:",
        ("tests/readers/test_stream.py",),
    ),
    Plant(
        "reader ignores the trailer's count",
        "streamer/readers/core/proof.py",
        'if trailer.state != "complete" or trailer.bytes_delivered != received:',
        'if trailer.state != "complete":',
        ("tests/readers/test_stream.py",),
    ),
    Plant(
        "a record that the end cuts is left out",
        "streamer/formats/window.py",
        "        if left := self.arrived - self._base - self._start:\n            raise CutRecord(",
        "        if (left := self.arrived - self._base - self._start) < 0:\n            raise CutRecord(",
        ("tests/unit/test_formats.py",),
    ),
    Plant(
        "checksum of TFRecord data not compared",
        "streamer/formats/tfrecord.py",
        "if tail(view, stop)[0] == ((found >> 15 | found << 17) + MASK_DELTA) & _WORD:",
        "if tail(view, stop)[0] == ((found >> 15 | found << 17) + MASK_DELTA) & _WORD or record:",
        ("tests/unit/test_formats.py",),
    ),
    Plant(
        "an archive without end mark joined",
        "streamer/formats/transform.py",
        "if not self._ended and self._offset:",
        "if not self._ended and not self._offset and self._passing:",
        ("tests/unit/test_joiners.py",),
    ),
    # The ranges of a part
    Plant(
        "part's body not told of a range that failed",
        "streamer/s3/part_requests.py",
        "        self._failed(index)\n",
        "",
        (BODIES,),
    ),
    Plant(
        "connection closed while idle fails a part's range",
        "streamer/s3/part_requests.py",
        "and get.response.reused and not get.response.begun:",
        "and get.response.reused and get.response.begun:",
        ("tests/relay/test_splice.py",),
    ),
    Plant(
        "part's request that has ended still counts as begun",
        "streamer/s3/part_requests.py",
        """        self._begun -= 1
        if self._most < self._request.requests:""",
        """        if self._most < self._request.requests:""",
        (BODIES,),
    ),
    Plant(
        "part keeps the requests that it needs no more",
        "streamer/s3/part_requests.py",
        "self._request.on_spare(ended)",
        "self._request.on_spare(0)",
        (BODIES, "tests/unit/test_parts.py", "tests/relay/test_sharing.py"),
    ),
    Plant(
        "late response of a part's later range never noticed",
        "streamer/s3/part_requests.py",
        "if deadlines and self._timer is None:",
        "if deadlines and self._timer is not None:",
        (BODIES,),
    ),
    Plant(
        "final answer on a used connection believed",
        "streamer/s3/part_requests.py",
        """        elif get.response.reused and is_final(error):
            self._begin(get.index, get.range, fresh=True)
        else:""",
        """        else:""",
        ("tests/relay/test_final_answers.py",),
    ),
    Plant(
        "literals between the ranges of a part dropped",
        "streamer/s3/part_body.py",
        "self._literal = memoryview(item)",
        "self._literal = memoryview(item)[:0]",
        (BODIES,),
    ),
    Plant(
        "no byte of a part's broken range in doubt",
        "streamer/s3/part_body.py",
        'return (0, b"") if self._body is None else self._body.doubted()',
        'return (0, b"") if self._body is None else (0, self._body.doubted()[1])',
        ("tests/relay/test_broken_bodies.py",),
    ),
    Plant(
        "part waits for ever for the range that failed",
        "streamer/s3/part_body.py",
        """        if index == self._at:
            self._loop.call_soon(self._fire)""",
        """        if index < self._at:
            self._loop.call_soon(self._fire)""",
        (BODIES,),
    ),
    # Responses that break
    Plant(
        "last bytes of a manifest's broken response believed",
        "streamer/s3/client/doubt.py",
        "return data[:-DOUBTED]",
        "return data",
        ("tests/unit/test_doubt.py",),
    ),
    Plant(
        "response that differs in the bytes in doubt goes on",
        "streamer/relay/fetch/successor.py",
        "if stage.agrees(self.again):",
        "if self.again is not None:",
        ("tests/unit/test_doubted_stages.py", "tests/relay/test_broken_bodies.py"),
    ),
    # Records of ranks
    Plant(
        "turn of a rank counts the bytes of the rank before it",
        "streamer/plan/dealing.py",
        "last, size = rank, 0",
        "last = rank",
        (DEALING,),
    ),
    Plant(
        "end mark counted as bytes of the stream",
        "streamer/plan/dealing.py",
        "offset += 0 if turn.mark else turn.size",
        "offset += turn.size",
        (DEALING,),
    ),
    Plant(
        "record that goes on in the next slice has an end mark",
        "streamer/plan/dealing.py",
        "ends[before] = after != [entry, start]",
        "ends[before] = True",
        (DEALING,),
    ),
    Plant(
        "ranks of one host among several get the slices of others",
        "streamer/plan/pieces.py",
        "size * ranks if self._others else (self._steps - at.step) * batch",
        "(self._steps - at.step) * batch",
        (RECORDS,),
    ),
    Plant(
        "a worker's FIFO has the steps of the next worker too",
        "streamer/plan/pieces.py",
        "self._stride * batch - size * ranks",
        "batch - size * ranks",
        (RECORDS,),
    ),
    Plant(
        "turns of a shared stream are those of worker 0",
        "streamer/plan/pieces.py",
        "fifo = self.step * ranks % self._fifos",
        "fifo = 0",
        (DEALING, RECORDS),
    ),
    Plant(
        "resumed loader begins with the FIFO of worker 0",
        "streamer/readers/torch/__init__.py",
        "turn = start.step % workers",
        "turn = 0",
        ("tests/readers/test_step_state.py",),
    ),
    Plant(
        "padding counted from the first rank",
        "streamer/plan/record_order.py",
        "self.global_batch + self.end * self.slice",
        "self.global_batch + self.first * self.slice",
        (RECORDS,),
    ),
    Plant(
        "walk resumes one run too late",
        "streamer/plan/pieces.py",
        "Checkpoint(step, walk.run, walk.record, sums)",
        "Checkpoint(step, walk.run + 1, walk.record, sums)",
        (
            RECORDS,
            "tests/unit/test_mix.py",
            "tests/unit/test_mix_changes.py",
            "tests/unit/test_folds.py",
        ),
    ),
    Plant(
        "last block of an object longer than the object",
        "streamer/plan/record_order.py",
        "yield Run(entry, first, min(end, bound))",
        "yield Run(entry, first, end)",
        (RECORDS,),
    ),
    # Files
    Plant(
        "file whose bytes end early taken for a whole one",
        "streamer/relay/files/target.py",
        "if file is None or self._at < file.size:",
        "if file is None:",
        ("tests/unit/test_pieces.py",),
    ),
    Plant(
        "files of a batch that are not whole forgotten",
        "streamer/relay/files/outlet.py",
        "for piece in pieces if piece.file.whole",
        "for piece in pieces",
        ("tests/sidecar/test_download.py",),
    ),
    # The service
    Plant(
        "admin server answers to any name",
        "sidecar/admin/access.py",
        "if self._loopback and not _is_address(host):",
        "if self._loopback and not host:",
        ("tests/sidecar/test_admin.py", "tests/sidecar/test_security.py"),
    ),
    Plant(
        "part of a file written at the wrong place",
        "streamer/relay/files/target.py",
        "offset_dst=at",
        "offset_dst=max(0, at - 1)",
        ("tests/sidecar/test_download.py",),
    ),
    Plant(
        "a link below the data directory followed",
        "streamer/directory.py",
        "os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW",
        "os.O_PATH | os.O_DIRECTORY",
        ("tests/sidecar/test_planted.py",),
    ),
    Plant(
        "file of a half download taken for a whole one",
        "sidecar/download/directory.py",
        "return all(size == ref.size for",
        "return all(size >= 0 for",
        ("tests/sidecar/test_download.py",),
    ),
)
