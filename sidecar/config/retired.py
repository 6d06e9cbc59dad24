"""Keys and values that job files no longer have, and what to use in their place."""

from __future__ import annotations

RETIRED = {
    "InputDataConfig[].Penstock.WhenChanged": "remove it; an object that changes after it was listed fails "
    "the epoch, and a restart lists anew",
    "InputDataConfig[].Penstock.WhenFailed: poison": "use close, or hold, which is the default",
    "InputDataConfig[].Penstock.Framing": "remove it; no setting needs to know what a record is",
    "InputDataConfig[].Penstock.Join: arrow": "set RecordWrapperType: RecordIO in place of it, and read the "
    "channel with TableReader",
    "InputDataConfig[].Penstock.Ranks.Batch": "set GlobalBatch to Batch times Count, times the hosts",
    "InputDataConfig[].Penstock.Ranks.Index": "write Records: {Format: TFRecord, Index: DIRECTORY} beside "
    "Ranks, with the format of the objects",
    "InputDataConfig[].Penstock.Ranks.RecordSize": "write Records: {Format: fixed:BYTES} beside Ranks",
    "InputDataConfig[].Penstock.LearnIndex": "write Records: {Format: TFRecord, Index: DIRECTORY}, with the "
    "format of the objects: without GlobalBatch in Ranks the channel learns the index",
    "Penstock.Endpoint.Profile": "set AWS_PROFILE, as for every AWS client",
    "Penstock.Hosts": "give each host --host-index and --host-count, or the variables of a launcher",
    "Penstock.RequestPrices": "remove it; the metric of the cost has the prices of S3 Standard in us-east-1",
    "Penstock.Processes": "one process sends all requests; remove it, and to use more cores run several "
    "sidecars, each with some of the channels",
}
"""By key, as `InputDataConfig[].Penstock.KEY`, or by key and value, as `Penstock.KEY: VALUE`, the advice."""
