"""Pure decisions: which parts to request, memory and concurrency limits, hedges, bandwidth."""
