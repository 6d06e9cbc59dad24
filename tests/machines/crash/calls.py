"""System calls by number, what each may fail with, and the name of a crash point.

    SHAPE:PROCESS:CALL:N:FAULT      kept-splice:sidecar:epoll_ctl:17:ENOMEM

names the N-th CALL (from 1) that PROCESS makes in a run of SHAPE. FAULT is `kill`, `delay` or an errno;
`EMFILEx20` is that errno for this call and the 19 after it, as of a shortage that passes.

The errors are those of the manual pages that Linux returns in a running system for such a descriptor: no
EBADF, EFAULT or EINVAL, which only a bug earns, and none for close(2), which releases the descriptor
whatever it returns. A write by which an event loop wakes itself (to an eventfd, a socket pair) finds room.
EPIPE of a pipe says that its reader has gone, and is believed. So is EPIPE or ECONNRESET of a
Unix socket, which the kernel returns only if the other process has closed it.
Memory of the process itself does not run out: Linux overcommits, and kills (CPython 3.11 hangs where mmap(2)
fails in a new thread).
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

_IN_ORDER = """
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt
getsockopt clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv
msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat
link unlink symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo
times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid
setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget
capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib
personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam
sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval
mlock munlock mlockall munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit
chroot sync acct settimeofday mount umount2 swapon swapoff reboot sethostname setdomainname iopl ioperm
create_module init_module delete_module get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg
afs_syscall tuxcall security gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity
sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit io_cancel get_thread_area
lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address
restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete
clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes
vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init
inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat
unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list
get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create
eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2
inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark
prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv
process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create
kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
pkey_alloc pkey_free statx io_pgetevents rseq
"""
_LATER = {
    424: "pidfd_send_signal",
    425: "io_uring_setup",
    426: "io_uring_enter",
    427: "io_uring_register",
    434: "pidfd_open",
    435: "clone3",
    436: "close_range",
    437: "openat2",
    438: "pidfd_getfd",
    439: "faccessat2",
    441: "epoll_pwait2",
}
NAMES = dict(enumerate(_IN_ORDER.split())) | _LATER
"""By number, on x86-64."""
NUMBERS = {name: number for number, name in NAMES.items()}

UNCOUNTED = (
    *("rt_sigreturn", "restart_syscall", "exit", "exit_group", "futex", "sched_yield", "seccomp", "getpid"),
    *("gettid", "rt_sigprocmask", "rt_sigaction", "sigaltstack", "set_robust_list", "rseq", "madvise"),
    *("clock_gettime", "sched_getaffinity", "getuid", "geteuid", "getgid", "getegid", "rt_sigtimedwait"),
)
"""Calls that are no points: they cannot fail, or how many there are is a matter of the threads' timing."""

_SHORT = ("EMFILE", "ENFILE", "ENOMEM")
_ERRORS: dict[str, tuple[str, ...]] = {
    "read socket": ("ECONNRESET", "ETIMEDOUT", "EAGAIN", "EINTR", "ENOMEM"),
    "read pipe": ("EAGAIN", "EINTR"),
    "read file": ("EIO", "EINTR", "ENOMEM"),
    "read unix": ("EAGAIN", "EINTR"),
    "read other": ("EAGAIN", "EINTR"),
    "write socket": ("EPIPE", "ECONNRESET", "EAGAIN", "ENOBUFS"),
    "write pipe": ("EAGAIN", "EINTR", "ENOMEM"),
    "write file": ("ENOSPC", "EIO", "EDQUOT", "EINTR"),
    "write unix": ("EINTR",),
    "write other": ("EINTR",),
    "recvfrom unix": ("EINTR",),
    "recvfrom socket": ("ECONNRESET", "ETIMEDOUT", "EAGAIN", "EINTR", "ENOMEM"),
    "recvmsg": ("ECONNRESET", "EAGAIN", "EINTR", "ENOMEM"),
    "sendto": ("EPIPE", "ECONNRESET", "EAGAIN", "ENOBUFS", "ENOMEM"),
    "sendmsg socket": ("EPIPE", "ECONNRESET", "EAGAIN", "ENOBUFS", "ENOMEM"),
    "sendmsg unix": ("EAGAIN", "ENOBUFS", "ENOMEM", "ETOOMANYREFS"),
    "splice socket": ("ECONNRESET", "ETIMEDOUT", "EAGAIN", "EINTR", "ENOMEM"),
    "splice pipe": ("EAGAIN", "EINTR", "ENOMEM", "EIO"),
    "tee": ("EAGAIN", "ENOMEM"),
    "vmsplice": ("EAGAIN", "ENOMEM"),
    "connect socket": ("ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "EADDRNOTAVAIL", "EAGAIN", "EINTR"),
    "accept": (*_SHORT, "ECONNABORTED", "ENOBUFS", "EINTR"),
    "accept4": (*_SHORT, "ECONNABORTED", "ENOBUFS", "EINTR"),
    "socket": (*_SHORT, "ENOBUFS"),
    "socketpair": _SHORT,
    "pipe": _SHORT,
    "pipe2": _SHORT,
    "eventfd2": _SHORT,
    "epoll_create1": _SHORT,
    "inotify_init1": _SHORT,
    "inotify_add_watch": ("ENOSPC", "ENOMEM"),
    "timerfd_create": _SHORT,
    "io_uring_setup": (*_SHORT, "EPERM", "ENOSYS"),
    "io_uring_enter": ("EINTR",),
    "memfd_create": _SHORT,
    "open": (*_SHORT, "EACCES", "EIO", "EINTR"),
    "openat": (*_SHORT, "EACCES", "EIO", "EINTR", "ENOSPC"),
    "dup": ("EMFILE", "ENOMEM"),
    "fcntl dup": ("EMFILE",),
    "fcntl size of a pipe": ("EPERM", "ENOMEM", "EBUSY"),
    "epoll_ctl add": ("ENOMEM", "ENOSPC"),
    "epoll_wait": ("EINTR",),
    "epoll_pwait": ("EINTR",),
    "poll": ("EINTR", "ENOMEM"),
    "ppoll": ("EINTR", "ENOMEM"),
    "select": ("EINTR", "ENOMEM"),
    "pselect6": ("EINTR", "ENOMEM"),
    "mkdir": ("ENOSPC", "EACCES", "EIO"),
    "mkdirat": ("ENOSPC", "EACCES", "EIO"),
    "mknod": ("ENOSPC", "EACCES", "EIO"),
    "mknodat": ("ENOSPC", "EACCES", "EIO"),
    "unlink": ("EIO", "EACCES"),
    "unlinkat": ("EIO", "EACCES"),
    "rename": ("ENOSPC", "EIO", "EACCES"),
    "renameat": ("ENOSPC", "EIO", "EACCES"),
    "chmod": ("EPERM", "EIO"),
    "fchmodat": ("EPERM", "EIO"),
    "flock": ("EINTR", "ENOLCK"),
    "ftruncate": ("ENOSPC", "EIO"),
    "stat": ("EACCES", "EIO", "ENOMEM"),
    "lstat": ("EACCES", "EIO", "ENOMEM"),
    "newfstatat": ("EACCES", "EIO", "ENOMEM"),
    "access": ("EACCES", "EIO"),
    "faccessat2": ("EACCES", "EIO"),
    "readlink": ("EACCES", "EIO"),
    "readlinkat": ("EACCES", "EIO"),
    "getdents64": ("EIO", "ENOMEM"),
    "clone": ("EAGAIN", "ENOMEM"),
    "clone3": ("EAGAIN", "ENOMEM"),
    "vfork": ("EAGAIN", "ENOMEM"),
    "execve": ("EAGAIN", "ENOMEM", "EACCES"),
    "bind": ("EADDRINUSE", "EACCES", "ENOMEM"),
    "listen": ("EADDRINUSE",),
    "getrandom": ("EINTR",),
    "prlimit64 set": ("EPERM",),
}
_ALIASES = dict.fromkeys(("readv", "pread64", "preadv", "preadv2"), "read") | dict.fromkeys(
    ("writev", "pwrite64", "pwritev", "pwritev2"), "write"
)
_PASSING = {"EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "ENOBUFS", "EDQUOT", "EAGAIN"}
"""Shortages, which may last for some calls."""
BURST = 20


def errors_of(call: str, kind: str) -> list[str]:
    """Faults with an errno, of a call of that kind (`notify.kind_of`)."""
    call = _ALIASES.get(call, call)
    once = _ERRORS.get(call) or _ERRORS.get(f"{call} {kind}", ())
    return [*once, *(f"{name}x{BURST}" for name in once if name in _PASSING)]


@dataclass(frozen=True, slots=True)
class Point:
    """One fault of one system call."""

    shape: str
    process: str
    call: str
    n: int
    fault: str

    def __str__(self) -> str:
        return f"{self.shape}:{self.process}:{self.call}:{self.n}:{self.fault}"

    @classmethod
    def of(cls, text: str) -> Point:
        """The point that `text` names. Raises ValueError."""
        shape, process, call, n, fault = text.split(":")
        point = cls(shape, process, call, int(n), fault)
        if call not in NUMBERS or not (point.errno or fault in ("kill", "delay")):
            raise ValueError(f"no such call or fault: {text}")
        return point

    @property
    def errno(self) -> int:
        """The error's number; 0 for other faults."""
        return int(getattr(errno, self.fault.partition("x")[0], 0))

    @property
    def times(self) -> int:
        """How many calls meet the error."""
        found = re.search(r"x(\d+)$", self.fault)
        return int(found[1]) if found else 1

    @property
    def sort(self) -> str:
        """What kind of fault it is: kill, delay or error."""
        return "error" if self.errno else self.fault
