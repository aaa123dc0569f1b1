"""System calls that a program in the sandbox may make, as a seccomp filter; all others fail with EPERM.

Numbers are those of the kernel's ``asm/unistd_64.h`` (x86_64) and ``asm-generic/unistd.h`` (aarch64).
"""

import errno
import platform
import struct

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16

_PLAIN = {
    "x86_64": """
        read:0 write:1 open:2 close:3 stat:4 fstat:5 lstat:6 poll:7 lseek:8 mmap:9 mprotect:10 munmap:11 brk:12
        rt_sigaction:13 rt_sigprocmask:14 rt_sigreturn:15 pread64:17 pwrite64:18 readv:19 writev:20 access:21 pipe:22
        select:23 sched_yield:24 mremap:25 msync:26 madvise:28 dup:32 dup2:33 pause:34 nanosleep:35 getitimer:36
        alarm:37 setitimer:38 getpid:39 sendfile:40 recvfrom:45 recvmsg:47 shutdown:48 getsockname:51 getpeername:52
        getsockopt:55 exit:60 wait4:61 uname:63 flock:73 fsync:74 fdatasync:75 truncate:76 ftruncate:77 getdents:78
        getcwd:79 rename:82 unlink:87 readlink:89 umask:95 gettimeofday:96 getrlimit:97 getrusage:98 sysinfo:99
        times:100 getuid:102 getgid:104 geteuid:107 getegid:108 getppid:110 getpgrp:111 getgroups:115 getpgid:121
        getsid:124 rt_sigpending:127 rt_sigtimedwait:128 rt_sigsuspend:130 sigaltstack:131 gettid:186 futex:202
        sched_getaffinity:204 epoll_create:213 getdents64:217 set_tid_address:218 fadvise64:221 timer_create:222
        timer_settime:223 timer_gettime:224 timer_getoverrun:225 timer_delete:226 clock_gettime:228 clock_getres:229
        clock_nanosleep:230 exit_group:231 epoll_wait:232 epoll_ctl:233 waitid:247 openat:257 newfstatat:262
        unlinkat:263 renameat:264 readlinkat:267 faccessat:269 pselect6:270 ppoll:271 set_robust_list:273
        epoll_pwait:281 timerfd_create:283 eventfd:284 timerfd_settime:286 timerfd_gettime:287 eventfd2:290
        epoll_create1:291 dup3:292 pipe2:293 preadv:295 pwritev:296 renameat2:316 getrandom:318 membarrier:324
        copy_file_range:326 statx:332 rseq:334 close_range:436 faccessat2:439 epoll_pwait2:441
    """,
    "aarch64": """
        read:63 write:64 openat:56 close:57 fstat:80 newfstatat:79 lseek:62 mmap:222 mprotect:226 munmap:215 brk:214
        rt_sigaction:134 rt_sigprocmask:135 rt_sigreturn:139 pread64:67 pwrite64:68 readv:65 writev:66 faccessat:48
        pipe2:59 pselect6:72 ppoll:73 sched_yield:124 mremap:216 msync:227 madvise:233 dup:23 dup3:24 nanosleep:101
        getitimer:102 setitimer:103 getpid:172 sendfile:71 recvfrom:207 recvmsg:212 shutdown:210 getsockname:204
        getpeername:205 getsockopt:209 exit:93 wait4:260 uname:160 flock:32 fsync:82 fdatasync:83 truncate:45
        ftruncate:46 getcwd:17 umask:166 gettimeofday:169 getrlimit:163 getrusage:165 sysinfo:179 times:153 getuid:174
        getgid:176 geteuid:175 getegid:177 getppid:173 getgroups:158 getpgid:155 getsid:156 rt_sigpending:136
        rt_sigtimedwait:137 rt_sigsuspend:133 sigaltstack:132 gettid:178 futex:98 sched_getaffinity:123 getdents64:61
        set_tid_address:96 fadvise64:223 timer_create:107 timer_gettime:108 timer_getoverrun:109 timer_settime:110
        timer_delete:111 clock_gettime:113 clock_getres:114 clock_nanosleep:115 exit_group:94 epoll_ctl:21 waitid:95
        unlinkat:35 renameat:38 readlinkat:78 set_robust_list:99 epoll_pwait:22 timerfd_create:85 timerfd_settime:86
        timerfd_gettime:87 eventfd2:19 epoll_create1:20 preadv:69 pwritev:70 renameat2:276 getrandom:278
        membarrier:283 copy_file_range:285 statx:291 rseq:293 close_range:436 faccessat2:439 epoll_pwait2:441
    """,
}
"""Calls allowed with any arguments: files are Landlock's affair."""

_CONDITIONAL = {
    "x86_64": {
        "ioctl": 16, "sendto": 44, "socketpair": 53, "clone": 56, "kill": 62, "fcntl": 72, "tgkill": 234,
        "prlimit64": 302, "clone3": 435,
    },
    "aarch64": {
        "ioctl": 29, "sendto": 206, "socketpair": 199, "clone": 220, "kill": 129, "fcntl": 25, "tgkill": 131,
        "prlimit64": 261, "clone3": 435,
    },
}  # fmt: skip

PIVOT_ROOT = {"aarch64": 41}.get(platform.machine(), 155)
"""Number of a system call that C libraries have no function for."""
SUPPORTED = platform.system() == "Linux" and platform.machine() in _AUDIT
"""Whether this module knows the machine's system calls."""


def seccomp_filter(pid: int) -> bytes:
    """Return the BPF program of ``struct sock_filter`` for the process ``pid``, which may signal only itself."""
    machine = platform.machine()
    # Flags with which glibc and musl start a thread; a new process or namespace has others.
    thread = 0x3D0F00, 0x7D0F00
    # SOCK_STREAM, alone and with SOCK_NONBLOCK and SOCK_CLOEXEC: datagrams could be sent to others' addresses.
    stream = 0x1, 0x801, 0x80001, 0x80801
    # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python asks of its own files.
    ioctl = 0x5401, 0x541B, 0x5421, 0x5450, 0x5451
    # Duplicates, flags and locks; not F_SETOWN, which sends signals to others.
    fcntl = 0, 1, 2, 3, 4, 5, 6, 7, 1030
    # For each name: allowed low words of arguments, arguments that are null pointers, and the error.
    rules: dict[str, tuple[dict[int, tuple[int, ...]], tuple[int, ...], int]] = {
        "ioctl": ({1: ioctl}, (), errno.ENOTTY),
        "sendto": ({}, (4,), errno.EPERM),
        "socketpair": ({0: (1,), 1: stream}, (), errno.EPERM),  # AF_UNIX
        "clone": ({0: thread}, (), errno.EPERM),
        "kill": ({0: (pid,)}, (), errno.EPERM),
        "tgkill": ({0: (pid,)}, (), errno.EPERM),
        "fcntl": ({1: fcntl}, (), errno.EPERM),
        "prlimit64": ({0: (0, pid)}, (2,), errno.EPERM),
    }
    program = [_op(_LOAD, _ARCH), _op(_EQUAL, _AUDIT[machine], 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    for pair in _PLAIN[machine].split():
        program += [_op(_EQUAL, int(pair.partition(":")[2]), 0, 1), _op(_RETURN, _ALLOW)]
    for name, number in _CONDITIONAL[machine].items():
        # C libraries fall back to clone, whose flags a filter can see, where there is no clone3.
        body = _checks(*rules[name]) if name in rules else [_op(_RETURN, _ERRNO | errno.ENOSYS)]
        program += [_op(_EQUAL, number, 0, len(body)), *body]
    return b"".join([*program, _op(_RETURN, _ERRNO | errno.EPERM)])


def _checks(words: dict[int, tuple[int, ...]], null: tuple[int, ...], error: int) -> list[bytes]:
    """Return the end of a filter: allow if arguments in ``words`` have one of their values, those in ``null`` 0."""
    conditions = [(_ARGUMENTS + 8 * at, values) for at, values in words.items()]
    conditions += [(_ARGUMENTS + 8 * at + half, (0,)) for at in null for half in (0, 4)]
    body: list[bytes] = []
    for offset, values in conditions:
        remaining = range(len(values), 0, -1)
        tests = [_op(_EQUAL, value & 0xFFFFFFFF, jump, 0) for value, jump in zip(values, remaining, strict=True)]
        body += [_op(_LOAD, offset), *tests, _op(_RETURN, _ERRNO | error)]
    return [*body, _op(_RETURN, _ALLOW)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
