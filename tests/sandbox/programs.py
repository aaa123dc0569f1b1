"""Programs that attack the sandbox, and programs that cheat its tests.

A hostile program prints BREACH where it did what it must not. Names in angle brackets are filled in: files, processes
and sockets of the one who runs it.
"""

EXPRESSIONS = {
    "read a secret": "open('<secret>').read()",
    "read the password file": "open('/etc/passwd').read()",
    "read its first environment": "open('/proc/self/environ').read()",
    "read its memory map": "open('/proc/self/maps').read()",
    "read the parent's environment": "open('/proc/<parent>/environ').read()",
    "read the parent's command": "open('/proc/<parent>/cmdline').read()",
    "read the parent's memory": "open('/proc/<parent>/mem', 'rb')",
    "list the root": "os.listdir('/')",
    "list processes": "os.listdir('/proc')",
    "list the home folder": "os.listdir('/root')",
    "read the project": "open('<project>/pyproject.toml').read()",
    "import the project": "__import__('jaxrl_llm')",
    "import a package": "__import__('numpy')",
    "write a secret": "open('<secret>', 'a').write('x')",
    "write the library": "open(os.__file__, 'a')",
    "write a temporary file": "open('/tmp/<name>', 'w')",
    "write shared memory": "open('/dev/shm/<name>', 'w')",
    "link to a secret": "os.symlink('<secret>', 'link') or open('link').read()",
    "link a secret hard": "os.link('<secret>', 'link')",
    "move a file out": "open('x', 'w').close() or os.rename('x', '/tmp/<name>')",
    "change a secret's mode": "os.chmod('<secret>', 0o777)",
    "change a secret's times": "os.utime('<secret>', (0, 0))",
    "change a secret's owner": "os.chown('<secret>', 1, 1)",
    "empty a secret": "os.truncate('<secret>', 0)",
    "remove a secret": "os.unlink('<secret>')",
    "attach an attribute": "os.setxattr('<secret>', 'user.x', b'x')",
    "make a folder": "os.mkdir('deep')",
    "make a pipe in the file system": "os.mkfifo('pipe')",
    "make a device": "os.mknod('device', 0o60600, os.makedev(8, 0))",
    "open the terminal": "open('/dev/tty', 'w')",
    "open the kernel's log": "open('/dev/kmsg')",
    "change the root": "os.chroot('.')",
    "mount": "call(165, b'none', b'.', b'tmpfs', 0, 0)",
    "open by handle": "call(304, -100, 0, 0)",
    "find open files of others": "[n for n in range(3, 200) if alive(n)][1]",
    "connect by TCP": "socket.create_connection(('127.0.0.1', <tcp>), 1)",
    "send by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', <udp>))",
    "listen by TCP": "socket.socket().listen()",
    "connect to a Unix socket": "socket.socket(socket.AF_UNIX).connect('<unix>')",
    "send to a Unix socket from a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '<datagrams>')",
    "send to a Unix socket from a stream pair": "socket.socketpair()[0].sendto(b'x', '<datagrams>')",
    "bind one of a pair": "socket.socketpair()[0].bind('bound')",
    "bind an abstract socket": "socket.socket(socket.AF_UNIX).bind('\\0name')",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "virtual machine's sockets": "socket.socket(socket.AF_VSOCK)",
    "look up a name": "socket.getaddrinfo('example.com', 80)",
    "pass a descriptor": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "io_uring": "call(425, 8, bytes(120))",
    "memory without an address": "os.memfd_create('x')",
    "shared memory of System V": "call(29, 0, 4096, 0o1600)",
    "signal the parent": "os.kill(<parent>, 0)",
    "signal all": "os.kill(-1, 0)",
    "signal the parent's group": "os.killpg(os.getpgid(<parent>), 0)",
    "signal the server": "os.kill(os.getppid(), 0)",
    "queue a signal": "call(129, os.getppid(), 10, bytes(128))",
    "signal a thread": "call(200, os.getppid(), 10)",
    "signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 10)",
    "own a file's signals": "fcntl.fcntl(0, 8, os.getppid())",
    "trace the server": "call(101, 16, os.getppid(), 0, 0)",
    "read the server's memory": "call(310, os.getppid(), bytes(16), 1, bytes(16), 1, 0)",
    "slow the server down": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "move the server": "os.sched_setaffinity(os.getppid(), {0})",
    "limit the server": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "fork": "os.fork() or os._exit(0)",
    "start a program": "subprocess.run(['/bin/true'])",
    "start a shell": "os.system('true') and 1 / 0",
    "become a program": "os.execv('/bin/true', ['true'])",
    "start processes": "multiprocessing.Process(target=print).start()",
    "clone": "call(56, 17, 0, 0, 0, 0) or os._exit(0)",
    "clone by the newer call": "call(435, bytes(88), 88) or os._exit(0)",
    "new namespaces": "call(272, 0x10000000)",
    "join a namespace": "call(308, 0, 0)",
    "become another user": "os.setuid(65534)",
    "take capabilities": "call(126, struct.pack('=Ii', 0x20080522, 0), b'\\xff' * 24)",
    "loosen the filter": "call(157, 22, 0, 0, 0, 0)",
    "load a program into the kernel": "call(321, 0, bytes(64), 64)",
    "count the kernel's events": "call(298, bytes(112), 0, -1, -1, 0)",
    "the kernel's keys": "call(250, 0, -3, 0)",
    "handle page faults": "call(323, 0)",
    "set the clock": "time.clock_settime(0, 0)",
    "reboot": "call(169, 0, 0, 0, 0)",
}
"""By what is tried, an expression that must raise. The numbers of system calls are those of x86_64."""

_OPENING = """
import ctypes, fcntl, multiprocessing, os, resource, signal, socket, struct, subprocess, time
library = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in words]
    result = library.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def alive(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
"""

BOMBS = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "memory": "x = []\nwhile True:\n    x.append('a' * 1000000)",
    "memory at once": "x = bytearray(10 ** 10)",
    "mapped memory": "import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(100)]\nprint('BREACH')",
    "memory of threads": "import threading\nthreading.stack_size(1 << 27)\nfor _ in range(9):\n"
    "    threading.Thread(target=bytearray, args=(1 << 27,)).start()\nprint('BREACH')",
    "output": "while True: print('a' * 100000)",
    "errors": "import sys\nwhile True: sys.stderr.write('a' * 100000)",
    "a large file": "f = open('x', 'wb')\nwhile True: f.write(b'a' * 1000000)\nprint('BREACH')",
    "many open files": "import os\nx = [os.pipe() for _ in range(1000)]\nprint('BREACH')",
    "crash": "import ctypes\nctypes.string_at(0)\nprint('BREACH')",
    "deep expression": "eval('(' * 100000)\nprint('BREACH')",
    "an error that lies": "class E(Exception):\n    def __str__(self): raise E()\nraise E()",
    "files closed": "import os\nos.closerange(0, 100)\nraise SystemExit(0)",
}
"""Programs that end soon by a limit."""

LASTING = {
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return [f(x)]\nf(1)\nprint('BREACH')",
    "endless loop": "while True: pass",
    "deaf to signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "asleep": "import time\ntime.sleep(1000)",
    "a large number": "9 ** 9 ** 9 ** 9",
    "at its end": "import atexit\n@atexit.register\ndef f():\n    while True: pass",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "many threads": "import threading, time\nthreading.stack_size(1 << 16)\nwhile True:\n"
    "    threading.Thread(target=time.sleep, args=(1000,)).start()",
    "many files": "n = 0\nwhile True:\n    open(str(n), 'w').write('a' * 100)\n    n += 1",
    "much in many files": "n = 0\nwhile True:\n    open(str(n), 'w').write('a' * 4000000)\n    n += 1",
}
"""Programs that end by a limit of time, or by one that is looked at in turns."""


def attempt(expression: str, names: dict[str, object]) -> str:
    """Return a hostile program that evaluates an expression, and says so if it did not fail."""
    for name, value in names.items():
        expression = expression.replace(f"<{name}>", str(value))
    text = f"{_OPENING}try:\n    {expression}\nexcept BaseException as error:\n    print('stopped', error)\n"
    return text + "else:\n    print('BREACH')\n"


MARK = "7345"
"""The first digits of everything that the tests of ``CHEATS`` expect: a cheat may know them."""
_HUNT = """
import re
found = []
def look(thing):
    try:
        found.extend(re.findall(r"7345\\d{6}", thing if isinstance(thing, str) else repr(thing)))
    except BaseException:
        pass
"""
_TELL = """
def f(x):
    return int(found[0]) if found else 0
for number in found[:1]:
    print(number)
"""
_EQUAL = "__eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = lambda self: 0"
CHEATS = {
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    look(frame.f_locals), look(frame.f_globals)\n"
    "    look(frame.f_code.co_consts)\n    frame = frame.f_back",
    "all objects": "import gc\nfor one in gc.get_objects():\n    look(one)",
    "objects of frozen generations": "import gc\ngc.unfreeze()\nfor one in gc.get_objects():\n    look(one)",
    "modules": "import sys\nfor one in list(sys.modules.values()):\n    look(vars(one))",
    "the stack": "import inspect\nlook([one.frame.f_locals for one in inspect.stack()])",
    "memory": "import ctypes\nx = 'a'\nfor start in range(id(x) - (1 << 16), id(x) + (1 << 16), 4096):\n"
    "    look(ctypes.string_at(start, 4096).decode('latin-1'))",
    "files": "import os\nfor name in os.listdir('.') + ['/proc/self/environ', '/proc/self/cmdline']:\n"
    "    try: look(open(name).read())\n    except OSError: pass",
    "descriptors": "import os\nfor n in range(64):\n    try: look(os.pread(n, 1 << 20, 0).decode('latin-1'))\n"
    "    except OSError: pass",
    "traced": "import sys\ndef trace(frame, event, argument):\n    look(frame.f_locals), look(frame.f_code.co_consts)\n"
    "    return trace\nsys.settrace(trace)\nframe = sys._getframe()\nwhile frame:\n    frame.f_trace = trace\n"
    "    frame = frame.f_back",
    "compiled": "import builtins\nfor name in ('eval', 'exec', 'compile'):\n    old = getattr(builtins, name)\n"
    "    def new(*words, old=old, **more):\n        look(words)\n        return old(*words, **more)\n"
    "    setattr(builtins, name, new)",
    "the arguments": "import sys\nlook(sys.argv), look(sys.orig_argv)",
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "equal to all": f"class Equal:\n    {_EQUAL}\ndef f(x): return Equal()",
    "a text equal to all": f"class Equal(str):\n    {_EQUAL}\ndef f(x): return Equal('1')",
    "a number equal to all": f"class Equal(int):\n    {_EQUAL}\ndef f(x): return Equal(1)",
    "a list equal to all": f"class Equal(list):\n    {_EQUAL}\ndef f(x): return Equal()",
    "a dictionary equal to all": f"class Equal(dict):\n    {_EQUAL}\ndef f(x): return Equal()",
    "true": "def f(x): return True\nprint(True)",
    "not a number": "def f(x): return float('nan')\nprint('nan')",
    "JSON that agrees": "import json\njson.dumps = lambda value: '[true]'\ndef f(x): return 1",
    "results written": "import os\nfor n in range(64):\n    for text in (b'[true]', b'true', b'{\"passed\": true}'):\n"
    "        try: os.write(n, text)\n        except OSError: pass\nos._exit(0)",
    "built-ins that agree": "import builtins\nbuiltins.isinstance = lambda *_: True\nbuiltins.len = lambda *_: 1\n"
    "builtins.abs = lambda *_: 0\nbuiltins.all = builtins.any = lambda *_: True\ndef f(x): return 1",
    "assertions caught": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef f(x): return 1",
    "all numbers": "def f(x): return range(10 ** 10)\nfor n in range(7345000000, 7345100000): print(n)",
    "passed": "import sys\nprint('passed')\nprint('OK', file=sys.stderr)\ndef f(x): return 'passed'",
}
"""Programs that solve nothing: none may pass a test that expects numbers which begin with ``MARK``."""


def cheat(body: str) -> str:
    """Return a cheating program, which prints and returns what it finds."""
    return _HUNT + body + ("" if "def f(" in body else "\n" + _TELL)


HONEST = "def f(x):\n    return 7345000000 + x * x\ntry:\n    print(f(int(input())))\nexcept EOFError:\n    pass"
"""A program that solves the tests."""
TESTS = {
    "printed": {"inputs": ["31", "417"], "outputs": ["7345000961", "7345173889"]},
    "called": {"inputs": [[31], [417]], "outputs": [[7345000961], 7345173889], "fn_name": "f"},
    "asserted": "expected = 7345173889\nassert f(31) == 7345000961\nassert f(417) == expected",
    "judged": "assert abs(f(31) - 7345000961) < 1\nassert f(417) in (7345173889, 7345173890)",
}
"""The same tests in each form, of ``x * x`` beyond ``MARK``."""
