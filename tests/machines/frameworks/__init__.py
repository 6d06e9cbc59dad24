"""Training frameworks over ranks that share a channel by record.

A channel of uneven objects is divided over N processes, with one global batch size for every N. Each
framework trains the same linear model from the same weights. What must hold: all ranks make the same number
of steps, no process hangs, and each step has the same records at every N. So the losses are equal, but for
sums that are rounded in another order.
"""
