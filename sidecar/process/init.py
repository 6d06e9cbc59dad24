"""Process 1 of a container: forwards signals to the command, and reaps processes whose parent has ended.

The kernel makes process 1 the parent of such processes of the trainer. Each stays a zombie until process 1
waits for it, and libuv waits for its own children alone. So the command runs in a child.
"""

from __future__ import annotations

import os
import signal


def fork_if_first() -> None:
    """Return in a child if this process is process 1, which ends with the child's exit code; else at once."""
    if os.getpid() != 1:
        return
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_signo != signal.SIGCHLD:
            # The kernel sends a terminal's signals to the child too, but a hang-up to process 1 alone.
            hung_up = received.si_signo == signal.SIGHUP and received.si_code > 0
            if hung_up or received.si_code <= 0:
                os.kill(-1 if hung_up else child, received.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)
