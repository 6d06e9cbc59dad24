"""Pure decisions: which parts are requested, in how much memory, how many at once, when a second time."""
