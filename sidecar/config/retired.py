"""Keys and values that job files no longer have, and what to use in their place."""

from __future__ import annotations

RETIRED = {
    "InputDataConfig[].Penstock.WhenChanged": "remove it; an object that changes after it was listed fails "
    "the epoch, and a restart lists anew",
    "InputDataConfig[].Penstock.WhenFailed: poison": "use close, or hold, which is the default",
    "InputDataConfig[].Penstock.Framing": "remove it; no setting needs to know what a record is",
    "InputDataConfig[].Penstock.Join: arrow": "set RecordWrapperType: RecordIO in place of it, and read the "
    "channel with TableReader",
    "Penstock.Processes": "one process sends all requests; remove it, and to use more cores run several "
    "sidecars, each with some of the channels",
}
"""By key, as `InputDataConfig[].Penstock.KEY`, or by key and value, as `Penstock.KEY: VALUE`, the advice."""
