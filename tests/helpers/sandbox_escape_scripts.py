"""Code that tries to break out of the sandbox of `code_reward`; `sandbox_escapes` runs it.

The first tables hold scripts. A script prints "escaped" as soon as one of its attempts succeeds, and "held" at its end.
It knows the names that `sandbox_escapes` writes in front of it: `FOLDER`, a folder of the machine with bait, `PARENT`,
the process of the trainer, and so on.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, MARK.encode())
def escaped(*what):
    print("escaped", *what, flush=True)
    os._exit(0)
def held(attempt, *arguments):
    try:
        result = attempt(*arguments)
    except (Exception, SystemExit):
        return
    escaped(attempt, arguments, result)
def refused(number, *arguments):
    if libc.syscall(number, *arguments) >= 0:
        escaped("system call", number)
"""

ONE_PROCESS = {
    "read the trainer's files": """
for path in (FOLDER + "/secret", FOLDER + "/../" + FOLDER.split("/")[-1] + "/secret", "/etc/passwd", "/etc/shadow"):
    held(open, path)
for path in (FOLDER, "/home", "/proc", "/sys", "/boot", "/dev/shm", "/var/tmp"):
    held(os.listdir, path)
for path in ("/root", "/etc", "/var"):
    try:
        names = os.listdir(path)
    except OSError:
        continue
    if len(names) > 1:
        escaped(path, names)
""",
    "write outside": """
for path in (FOLDER + "/new", FOLDER + "/secret", "/x", "/var/tmp/x", "/dev/shm/x", "/usr/x", sys.prefix + "/x"):
    held(open, path, "a")
    held(os.mkdir, path + ".d")
""",
    "remove, rename or link files outside": """
held(os.remove, FOLDER + "/secret")
held(os.rename, FOLDER + "/secret", FOLDER + "/other")
held(os.rename, FOLDER + "/secret", "stolen")
held(os.link, FOLDER + "/secret", "stolen")
held(os.rmdir, FOLDER + "/empty")
""",
    "change modes, times, lengths and attributes of files outside": """
held(os.chmod, FOLDER + "/secret", 0)
held(os.chown, FOLDER + "/secret", -1, -1)
held(os.utime, FOLDER + "/secret", (0, 0))
held(os.truncate, FOLDER + "/secret", 0)
held(os.setxattr, FOLDER + "/secret", "user.x", b"x")
held(os.mkfifo, FOLDER + "/fifo")
""",
    "links out of the folder": """
def through(target, name):
    os.symlink(target, name)
    return open(name).read()
held(through, FOLDER + "/secret", "link1")
held(through, "../" * 9 + FOLDER + "/secret", "link2")
held(through, "/proc/self/root" + FOLDER + "/secret", "link3")
held(through, "/proc/self/environ", "link4")
""",
    "the environment": """
if SECRET in str(os.environ) or "GROUPGRAD_SECRET" in os.environ:
    escaped("os.environ")
for process in ("self", os.getppid(), 1, PARENT):
    held(open, f"/proc/{process}/environ")
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
entries = []
while environ[len(entries)]:
    entries.append(environ[len(entries)])
if any(SECRET.encode() in entry for entry in entries):
    escaped("environ")
""",
    "/proc of the trainer": """
for name in ("mem", "maps", "cmdline", "status", "root/etc/passwd", "fd/0", "cwd/x"):
    held(open, f"/proc/{PARENT}/{name}", "rb")
held(os.readlink, f"/proc/{PARENT}/cwd")
held(os.listdir, f"/proc/{PARENT}/fd")
""",
    "open files of the trainer": """
for fd in range(3, 4096):
    held(os.fstat, fd)
""",
    "TCP": """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", TCP)), (socket.AF_INET6, ("::1", TCP))):
    held(lambda: socket.socket(family, socket.SOCK_STREAM).connect(address))
held(socket.create_connection, ("127.0.0.1", TCP), 1)
held(socket.create_server, ("127.0.0.1", 0))
""",
    "UDP and raw sockets": """
import socket
held(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", UDP)))
held(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
held(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
held(socket.getaddrinfo, "example.com", 80)
""",
    "unix sockets": """
import socket
for path in (FOLDER + "/socket", "\\0" + MARK):
    held(lambda: socket.socket(socket.AF_UNIX).connect(path))
    held(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", path))
""",
    "sockets of other kinds": """
import socket
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        held(socket.socket, family, kind)
held(socket.socketpair, socket.AF_INET)
""",
    "signals to the trainer": """
import signal
for number in (0, signal.SIGURG, signal.SIGIO):
    held(os.kill, PARENT, number)
    held(os.killpg, PARENT, number)
held(os.pidfd_open, PARENT)
refused(234, PARENT, PARENT, 23)
refused(200, PARENT, 23)
""",
    "signals through files": """
import fcntl
read, write = os.pipe()
held(fcntl.fcntl, read, fcntl.F_SETOWN, PARENT)
held(fcntl.ioctl, read, 0x8901, PARENT.to_bytes(4, "little"))
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(write, b"x")
""",
    "memory of the trainer": """
refused(101, 16, PARENT, 0, 0)
refused(101, 0x4206, PARENT, 0, 0)
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
part = Part(ctypes.addressof(buffer), 8)
for call in (libc.process_vm_readv, libc.process_vm_writev):
    held(lambda: call(PARENT, ctypes.byref(part), 1, ctypes.byref(part), 1, 0) >= 0 or 1 / 0)
""",
    "limits and priorities of the trainer": """
import resource
held(resource.prlimit, PARENT, resource.RLIMIT_NOFILE)
held(resource.prlimit, PARENT, resource.RLIMIT_NOFILE, (1, 1))
held(os.sched_setaffinity, PARENT, {0})
held(os.setpriority, os.PRIO_PROCESS, PARENT, 19)
""",
    "its own limits": """
import resource
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE"):
    limit = getattr(resource, "RLIMIT_" + name)
    held(resource.setrlimit, limit, (resource.RLIM_INFINITY,) * 2)
""",
    "rights of root and namespaces": """
held(os.setuid, 0)
held(os.setgid, 0)
held(os.setgroups, [0])
held(os.chroot, ".")
held(os.nice, -1)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):
    refused(272, flag)
    refused(56, flag | 17, 0, 0, 0, 0)
refused(165, b"none", b"/", b"tmpfs", 0, 0)
refused(161, b"/")
held(os.mknod, "device", 0o20666, os.makedev(1, 1))
""",
    "system calls around the limits": """
name = b"x"
for number, *arguments in (
    (425, 8, bytes(256)), (319, name, 0), (29, 0, 1 << 20, 0o1600), (240, name, 0o102, 0o600, 0), (308, 0, 0),
    (248, b"user", name, name, 1, -3), (249, b"user", name, 0, -3), (250, 0, -3, 0), (68, 0, 0o1600),
    (64, 0, 1, 0o1600),
):
    refused(number, *arguments)
""",
    "devices": """
for name in ("mem", "kmem", "port", "vda", "sda", "tty", "console", "kvm", "fuse", "ptmx", "nvidia0", "kmsg"):
    held(open, "/dev/" + name, "rb")
    held(open, "/dev/" + name, "r+b")
held(os.openpty)
""",
    "a second process": """
import multiprocessing, subprocess
def child():
    return os.fork() or os._exit(0)
held(child)
held(lambda: subprocess.run(["/bin/sh", "-c", "true"]).check_returncode())
held(os.posix_spawn, sys.executable, [sys.executable, "-c", ""], {})
held(lambda: os.system("true") and 1 / 0)
refused(58)
refused(435, bytes(88), 88)
""",
    "threads without end": """
import threading, time
threading.stack_size(32768)
started = 0
try:
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
if started > 32:
    escaped("threads")
""",
    "a memory bomb": """
blocks = []
try:
    while len(blocks) < 1024:
        blocks.append(bytearray(1 << 20))
except MemoryError:
    blocks = len(blocks) if len(blocks) < 256 else 1024
if blocks == 1024 or not isinstance(blocks, int):
    escaped("memory")
held(bytearray, 1 << 40)
""",
    "a full disk": """
def fill():
    written = 0
    for number in range(100):
        with open(f"fill{number}", "wb", buffering=0) as file:
            for _ in range(64):
                written += file.write(bytes(1 << 20))
                if written > 4 << 20:
                    escaped("disk")
held(fill)
""",
    "files without end": """
def many():
    for number in range(5000):
        open(f"many{number}", "w").close()
held(many)
""",
}

KILLED = {
    "a loop without end": "while True: pass",
    "sleep for ever": "import time; time.sleep(1000)",
    "ignore all signals": """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(1000)
""",
    "a huge integer": "print(len(str(9 ** 9 ** 9)))",
    "output without end": "while True: print('held' * 100000)",
    "recursion without end": "sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "the x32 interface": "libc.syscall(0x40000000 | 41, 2, 1, 0)\nescaped('x32')",
    "an expected word printed before an end by os._exit": "print('held', flush=True); os._exit(3)",
}
"""Scripts that can only be ended; none of them may pass."""

FOUND = {
    "what is expected, in objects and frames": """
import gc, re
texts = [repr(o)[:100000] for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]
frame = sys._getframe()
while frame is not None:
    texts += [repr(value) for value in [*frame.f_locals.values(), *frame.f_globals.values()]]
    frame = frame.f_back
found = re.search(r"expected-[0-9]+", " ".join(texts) + sys.stdin.read())
print(found and found.group())
""",
    "what is expected, in its memory": """
import re
try:
    for fd in range(64):
        os.lseek(fd, 0, 0)
        found = re.search(rb"expected-[0-9]+", os.read(fd, 1 << 20))
        if found:
            print(found.group().decode())
except OSError:
    found = re.search(rb"expected-[0-9]+", open("/proc/self/mem", "rb").read())
""",
}
"""Scripts that look for the expected output, a number behind a word; none of them may find it."""

MANY_PROCESSES = {
    "a fork bomb": """
import time
read, write = os.pipe()
root = os.getpid()
for _ in range(200):  # children go on from here, each with a loop of its own
    try:
        if os.fork() == 0:
            os.write(write, b".")
    except OSError:
        break
time.sleep(0.5)
if os.getpid() != root:
    os._exit(0)
if len(os.read(read, 1000)) > 16:
    escaped("processes")
""",
    "a child in a session of its own": """
import time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
""",
    "a daemon by two forks": """
import signal, time
if os.fork() == 0:
    for attempt in (os.setsid, lambda: os.setpgid(0, 0)):
        try:
            attempt()
        except OSError:
            pass
    if os.fork() == 0:
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        for fd in range(64):
            try:
                os.close(fd)
            except OSError:
                pass
        libc.prctl(1, 0)
        time.sleep(60)
    os._exit(0)
""",
    "kill the supervisor": """
for process in (1, os.getppid(), 0, -1):
    if process != os.getpid():
        try:
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(process, signal.SIGTERM)
            if process in (1, os.getppid()):
                os.kill(process, signal.SIGKILL)
        except OSError:
            pass
""",
    "memory in many processes": """
import time
for _ in range(40):
    try:
        if os.fork() == 0:
            blocks = []
            try:
                while len(blocks) < 512:
                    blocks.append(bytearray(1 << 20))
            except MemoryError:
                pass
            os._exit(len(blocks) >= 512)
    except OSError:
        break
try:
    while True:
        if os.wait()[1]:
            escaped("memory of a child")
except ChildProcessError:
    pass
""",
}

TESTS = ["assert f(2) == 4", "assert abs(f(3) - 9.0) < 1e-6", "def check(c):\n    assert c(5) == 25\ncheck(f)"]
FORGED = {
    "os._exit(0) when it loads": "import os; os._exit(0)",
    "sys.exit(0) when it loads": "import sys; sys.exit(0)",
    "os._exit(0) when it is called": "import os\ndef f(x): os._exit(0)",
    "sys.exit(0) when it is called": "import sys\ndef f(x): sys.exit(0)",
    "a value equal to everything": """
class Same:
    __eq__ = lambda s, o: True
    __sub__ = __rsub__ = __abs__ = lambda *a: 0.0
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = lambda *a: True
    __hash__ = lambda s: 0
    __class__ = property(lambda s: int)
    __float__ = lambda s: 0.0
def f(x): return Same()
""",
    "numbers and texts equal to everything": """
class Same(float):
    __eq__ = lambda s, o: True
    __sub__ = __rsub__ = lambda s, o: 0.0
def f(x): return [Same(1), Same(1.0)][0]
""",
    "other builtins": """
import builtins
def abs(x): return 0.0
def check(c): pass
builtins.abs = abs
builtins.AssertionError = builtins.Exception = type("E", (BaseException,), {})
__builtins__["AssertionError"] = None
AssertionError = None
def f(x): return None
""",
    "unittest and pytest replaced": """
import sys, types, unittest, builtins
unittest.main = unittest.TestCase.assertEqual = lambda *a, **k: None
sys.excepthook = lambda *a: None
sys.modules["ast"] = sys.modules["json"] = types.ModuleType("x")
builtins.compile = builtins.exec = lambda *a, **k: None
def f(x): return 0
""",
    "a verdict written to every open file": """
import os
LINES = b'{"passed": true, "why": ""}\\n{"loaded": true}\\n{"value": true}\\n'
def write():
    for fd in range(64):
        try:
            os.write(fd, LINES * 4)
        except OSError:
            pass
def f(x):
    write()
    return 0
write()
""",
    "the tests read from frames and objects": """
import gc, re, sys
def f(x):
    texts = [o for o in gc.get_objects() if isinstance(o, str)]
    frame = sys._getframe()
    while frame:
        texts += [repr(v) for v in frame.f_locals.values()] + [repr(v) for v in frame.f_globals.values()]
        frame = frame.f_back
    for o in gc.get_objects():
        if isinstance(o, (list, tuple, dict)):
            try:
                texts.append(repr(o)[:20000])
            except Exception:
                pass
    found = re.search(r"f\\(%d\\) (?:==|-) ([0-9.]+)" % x, " ".join(texts).replace("c(5)", "f(5)"))
    return float(found.group(1)) if found else None
""",
    "functions of the test's process called": """
import json, os
def f(x):
    for fd in range(3, 10):
        for n in range(20):
            try:
                for op, *more in (("call", [], {"dict": []}), ("getattr", "__globals__")):
                    line = json.dumps({"op": op, "arguments": [{"yours": n}, *more]})
                    os.write(fd, line.encode() + b"\\n")
            except OSError:
                pass
    return 0
""",
    "an error of every kind": """
class E(BaseException): pass
def f(x): raise [E, SystemExit(0), StopIteration(4)][x % 3]
""",
    "a value that is too large": "def f(x): return 'x' * (1 << 24)",
    "a list without end": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "a deep list": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "not a number": "def f(x): return float('nan')",
    "the call never returns": "def f(x):\n    while True: pass",
}
"""Code for `TESTS`; none of it may pass a single one."""
