"""Machines that look for what breaks Penstock: `python -m tests.machines NAME --seed S`.

    seed ──draw──> case ──run──> result         one machine: a module `machine` in a folder of this one
    seeds ──> pool of processes ──> report      the same for all: what broke, and the command that repeats it

A machine says what a case is and how it is judged (`machine.Machine`); `pool` runs cases in processes that
may die or hang, `report` adds up what came of them, and the command's exit code is 1 if a case is broken.
"""
