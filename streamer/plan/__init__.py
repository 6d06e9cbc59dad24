"""Plans: the bytes that each channel streams, and their order. Pure and synchronous.

    entries ─ `Plan.order`: shuffle, shard ─▶ whole objects ─────┐
    entries, record table, order of records, deal                │
            └─ `Walk`, from any checkpoint on ─▶ pieces ─ folds ─┼─▶ segments ─ `cut` ─▶ parts ─ `gathered`
                 (rank, entry, first, end, start, stop)          │
                                                                 ├─▶ sums of each rank, and checkpoints
                                                                 ├─▶ the turns of ranks that share a stream
                                                                 └─▶ offsets of steps, records and objects

A segment is a byte range of one frozen object version, or literal bytes. This package alone computes total
length, digest, order and offsets; the packages that move bytes (`s3`, `relay`, `sink`) carry the plan out. It
imports none of them.
"""

from __future__ import annotations

from streamer.formats.transform import Join
from streamer.plan.digest import parse_partial
from streamer.plan.entries import Entries
from streamer.plan.growth import Growth
from streamer.plan.parts import (
    LONGEST_RECORD,
    ObjectRef,
    ObjectStart,
    Part,
    Segment,
    cut,
    frame,
)
from streamer.plan.plan import Arrangement, Plan
from streamer.plan.position import START, Position, ResumePoint
from streamer.plan.shuffle import Balance, Permutation, Shard
from streamer.plan.uris import S3Uri, parse_address, parse_object_uri, parse_s3_uri
from streamer.plan.validators import bare_etag, is_modified

__all__ = [
    "LONGEST_RECORD",
    "START",
    "Arrangement",
    "Balance",
    "Entries",
    "Growth",
    "Join",
    "ObjectRef",
    "ObjectStart",
    "Part",
    "Permutation",
    "Plan",
    "Position",
    "ResumePoint",
    "S3Uri",
    "Segment",
    "Shard",
    "bare_etag",
    "cut",
    "frame",
    "is_modified",
    "parse_address",
    "parse_object_uri",
    "parse_partial",
    "parse_s3_uri",
]
