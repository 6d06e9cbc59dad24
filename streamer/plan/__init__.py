"""What is streamed, and in which order: pure, synchronous, testable without I/O.

A channel's plan is one ordered sequence of segments, each a byte range of one frozen object version.
Total length, digest, order and every offset come from here and from nowhere else; the rooms that move
bytes (`source`, `relay`, `sink`) only carry the plan out. This package imports none of them.
"""

from __future__ import annotations

from streamer.plan.parts import Part, cut
from streamer.plan.plan import Plan, S3Uri, frozen_order, parse_s3_uri
from streamer.plan.segments import ObjectRef, Segment, bare_etag

__all__ = [
    "ObjectRef",
    "Part",
    "Plan",
    "S3Uri",
    "Segment",
    "bare_etag",
    "cut",
    "frozen_order",
    "parse_s3_uri",
]
