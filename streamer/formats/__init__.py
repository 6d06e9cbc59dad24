"""Record formats of a Pipe channel: TFRecord, RecordIO and text lines (contract §5), and WebDataset.

    window    bytes that arrived and are not yet cut into records; the loop that all readers share
    crc       CRC-32C and its masked form
    tfrecord, recordio, lines
              one reader each, and an encoder where the format has a frame
    tar       samples of WebDataset streams, whose records are made dicts by `sample`

A reader takes any unbuffered binary stream (`readinto`) and yields lists of `bytes`, one list per block,
so that a consumer pays for a record what the record costs and nothing per system call. The rooms below
know no channel, no FIFO and no trailer: whether an end of file is the real end is for the stream to say.
"""
