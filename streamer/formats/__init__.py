"""Record formats of a Pipe channel: TFRecord, RecordIO and text lines (contract §5), and WebDataset.

    window    base of all readers: the buffer of bytes that are not yet cut into records, and the loop
    crc       CRC-32C and its masked form
    tfrecord, recordio, lines
              one reader each, and an encoder if the format has a frame
    tar       reader of WebDataset streams; `sample` makes a dict of each record
    transform joins tar archives (`join_tar`) or texts

A reader takes any unbuffered binary stream (`readinto`) and yields lists of `bytes`, one list per block, so
that the cost of a system call is divided over many records. This package does not depend on channels, FIFOs
or trailers: the stream that a reader reads from decides whether an end of file is the real end.
"""
