"""Restrictions that Linux lets a process put on itself: Landlock, seccomp, limits, capabilities, namespaces.

By ctypes, from the kernel's own headers: no library is needed, and no privileges.
"""

import contextlib
import ctypes
import os
import resource
import struct

from jaxrl_llm.sandbox import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, of the same numbers on every machine."""
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = (
    1 << bit for bit in (0, 1, 2, 3, 5, 8, 14)
)
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights of files since a version of Landlock: each newer right is handled, and so denied, too."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CLONE = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
_CLONE |= {"pid": 0x20000000, "net": 0x40000000}
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2
ROOT_BYTES, ROOT_FILES = 40 << 20, 2000
"""Size of the file system of a new root, and number of files in it."""

_library = ctypes.CDLL(None, use_errno=True)
_library.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _library.syscall(ctypes.c_long(number), *words)


def _prctl(option: int, value: int, argument: int | ctypes.Array | None = 0) -> None:
    last = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    words = ctypes.c_ulong(value), last, ctypes.c_ulong(0), ctypes.c_ulong(0)
    _check(_library.prctl(ctypes.c_int(option), *words), f"prctl {option}")


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 without it."""
    return max(0, _syscall(_CREATE_RULESET, None, 0, 1)) if syscalls.SUPPORTED else 0


def ruleset(folder: str, readable: list[str]) -> int:
    """Return a descriptor of Landlock rules: plain files in ``folder``, reading what is ``readable``, ``/dev/null``.

    Everything else that the kernel's version can deny is denied: other files, folders, links and devices, TCP,
    abstract Unix sockets, signals to processes outside.
    """
    version = landlock_version()
    rights = _FILE_RIGHTS[max(since for since in _FILE_RIGHTS if since <= version)]
    rights_masks = [(1 << rights) - 1]
    rights_masks += [0b11] * (version >= 4) + [0b11] * (version >= 6)  # TCP since 4; sockets and signals since 6
    packed = struct.pack(f"={len(rights_masks)}Q", *rights_masks)
    rules = _check(_syscall(_CREATE_RULESET, packed, len(packed), 0), "landlock_create_ruleset")
    folder_rights = _READ_DIR | _REMOVE_FILE | _MAKE_REG | _READ_FILE | _WRITE_FILE | _TRUNCATE
    path_rights = [(folder, folder_rights), ("/dev/null", _READ_FILE | _WRITE_FILE)]
    path_rights += [(path, _READ_FILE | _READ_DIR * os.path.isdir(path)) for path in readable]
    for path, right in path_rights:
        with contextlib.suppress(FileNotFoundError):
            place = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_PATH", 0))
            rule = struct.pack("=Qi", right & rights_masks[0], place)
            _check(_syscall(_ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule {path}")
            os.close(place)
    return rules


def confine(rules: int | None) -> None:
    """Give up, for good, what this process could do beyond ``rules`` and the allowed system calls.

    Without rules (a kernel without Landlock) only the rest; nothing on a system other than Linux.
    """
    if not syscalls.SUPPORTED:
        return
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    _check(_library.capset(header, none), "capset")
    _prctl(_PR_SET_PDEATHSIG, 9)
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if rules is not None:
        _check(_syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
        os.close(rules)
    program = ctypes.create_string_buffer(syscalls.seccomp_filter(os.getpid()))
    count = (len(program) - 1) // 8
    packed = struct.pack("@HP", count, ctypes.addressof(program))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(packed))


def limit(memory: int, seconds: int, file_size: int, files: int) -> None:
    """Limit address space and file size (bytes), processor time (seconds) and open files of this process."""
    for name, most in (("AS", memory), ("CPU", seconds), ("FSIZE", file_size), ("NOFILE", files), ("CORE", 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of address space
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def leave_namespaces() -> None:
    """Move into new namespaces of everything; children of processes too. OSError: forbidden, as in containers."""
    user, group = os.getuid(), os.getgid()
    _check(_library.unshare(ctypes.c_int(sum(_CLONE.values()))), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def new_root(place: str, library: str) -> str:
    """Make ``place`` a root with the library, ``/proc`` and ``/dev/null`` alone; return the folder open for writing.
    OSError: forbidden, as in containers.
    """
    _check(_library.unshare(ctypes.c_int(_CLONE["mount"])), "unshare")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={ROOT_BYTES},nr_inodes={ROOT_FILES},mode=755")
    for path in (library, "/proc", "/dev/null"):
        if os.path.isdir(path):
            os.makedirs(place + path)
        else:
            os.makedirs(os.path.dirname(place + path))
            os.close(os.open(place + path, os.O_CREAT))
        _mount(path, place + path, None, _MS_BIND | _MS_REC)
    writable, old_root = "/own", "/before"
    for folder in (writable, old_root):
        os.mkdir(place + folder)
    os.chdir(place)
    _check(_syscall(syscalls.PIVOT_ROOT, b".", old_root[1:].encode()), "pivot_root")
    os.chdir("/")
    _check(_library.umount2(old_root.encode(), ctypes.c_int(_MNT_DETACH)), "umount")
    os.rmdir(old_root)
    return writable


def _mount(source: str, place: str, kind: str | None, flags: int, options: str = "") -> None:
    words = source.encode(), place.encode(), kind.encode() if kind else None
    result = _library.mount(*words, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {place}")


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it ends."""
    if syscalls.SUPPORTED:
        _prctl(_PR_SET_PDEATHSIG, 9)
