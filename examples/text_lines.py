"""A text-line job with the standard library alone: naive Bayes over the words of streamed lines.

A line is a topic, a tab, and words. The counts of one pass over `train` are the model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from streamer.readers import PipeReader


def main() -> None:
    lines: Counter[bytes] = Counter()
    words: defaultdict[bytes, Counter[bytes]] = defaultdict(Counter)
    for block in PipeReader("train", "TextLine").batches():
        for line in block:
            topic, _, text = line.partition(b"\t")
            lines[topic] += 1
            words[topic].update(text.split())
    print(f"read {lines.total()} lines on {len(lines)} topics")

    vocabulary = len(set().union(*words.values()))
    right = total = 0
    for line in PipeReader("eval", "TextLine"):
        topic, _, text = line.partition(b"\t")
        scores = {
            each: math.log(lines[each])
            + sum(math.log((counts[word] + 1) / (counts.total() + vocabulary)) for word in text.split())
            for each, counts in words.items()
        }
        right += max(scores, key=scores.__getitem__) == topic
        total += 1
    print(f"accuracy {right / total:.4f}")


if __name__ == "__main__":
    main()
