"""Script that confines its own process, then runs a program in it. The interpreter gets this source with `-c`.

Only the standard library is used, since nothing else has to exist in a sandbox. `sandbox.py` writes the
specification to standard input: twelve digits with its length, then its bytes. The rest of standard input is left for
the program. The script writes "ready" to standard output when the process is confined, then starts the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 22, 36, 38, 47
CLONE_NEWUSER, CLONE_THREAD, CLONE_NEW = 0x10000000, 0x00010000, 0x7E020080
NAMESPACES = 0x20000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, host name, System V IPC, processes, network."""

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Number of the architecture in seccomp, and its column in the tables of system calls."""

# System calls, with their numbers on x86_64 and aarch64; "-" where an architecture lacks one.
DENIED = """
socket 41 198, shmget 29 194, shmat 30 196, msgget 68 186, semget 64 190, mq_open 240 180, memfd_create 319 279,
memfd_secret 447 447, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448, unshare 272 97, setns 308 268,
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, add_key 248 217, request_key 249 218, keyctl 250 219, inotify_init 253 -,
inotify_init1 294 26, fanotify_init 300 262, syslog 103 116
"""
DENIED_NEW_PROCESSES = "fork 57 -, vfork 58 -"
DENIED_WITHOUT_OWN_FILES = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchown 93 55,
fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, setxattrat 463 463, removexattrat 466 466, file_setattr 469 469, utime 132 -, utimes 235 -,
futimesat 261 -, utimensat 280 88, truncate 76 45
"""
"""Landlock leaves an owner the right to change modes, owners, times and attributes of any file."""
DENIED_WITHOUT_OWN_PROCESSES = """
kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
pidfd_open 434 434, pidfd_send_signal 424 424, setsid 112 157, setpgid 109 154, setpriority 141 140,
ioprio_set 251 30, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, migrate_pages 256 238, move_pages 279 239
"""
"""Without a process namespace, processes outside have names, and a session would outlive the end."""
CLONE, CLONE3, SOCKETPAIR, PRLIMIT = (56, 220), (435, 435), (53, 199), (302, 261)
FCNTL, IOCTL, PRCTL = (72, 25), (16, 29), (157, 167)
EPERM, ENOSYS = 1, 38


def main() -> None:
    """Reads the specification, confines the process, says so and runs the program."""
    spec = marshal.loads(_read(int(_read(12))))
    try:
        confine(spec)
        program: dict[str, Any] = {"__name__": "sandbox_programs"}
        exec(compile(spec["program"], "<sandbox>", "exec"), program)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    os.write(1, b"ready\n")
    program[spec["entry"]](*spec["arguments"])


def confine(spec: dict[str, Any]) -> None:
    """Drops every right that the mechanism takes away. Returns only in the process that will run the program."""
    mechanism, uid = spec["mechanism"], spec["uid"]
    if mechanism == "bubblewrap":
        os.setsid()  # signals to its own process group would reach bubblewrap
    else:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != spec["parent"]:
            os._exit(1)  # the parent ended before the line above
        if mechanism == "namespaces":
            _unshare()
            _supervise()  # the first process of the namespace: with it, the kernel ends all others
        _supervise()
    if mechanism == "landlock":
        os.chdir("/")
    else:
        _mount_folder(spec["folder"], spec["folder_bytes"], os.getuid() if uid is None else uid)
    for name, limit in spec["limits"].items():
        _limit(getattr(resource, name), limit)
    _drop_privileges(uid)
    if mechanism != "bubblewrap":
        _landlock(spec["readable"], spec["folder"] if mechanism == "namespaces" else None)
    denied = [DENIED]
    if spec["single_process"]:
        denied.append(DENIED_NEW_PROCESSES)
    if mechanism != "bubblewrap":
        denied.append(DENIED_WITHOUT_OWN_FILES)
    if mechanism == "landlock":
        denied.append(DENIED_WITHOUT_OWN_PROCESSES)
    _seccomp(",".join(denied), spec["single_process"])


def _read(count: int) -> bytes:
    """Reads exactly this many bytes of standard input, and none ahead."""
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            os._exit(1)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _call(name: str, *arguments: Any) -> int:
    result = getattr(LIBC, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, *arguments: Any) -> None:
    _call("prctl", option, *(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]))


def _unshare() -> None:
    """Enters namespaces of its own; without root, through a user namespace in which the user keeps its number."""
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", NAMESPACES | (CLONE_NEWUSER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", None, b"/", None, 0x4000 | 0x40000, None)  # private: no mount below reaches the machine


def _supervise() -> None:
    """Forks and returns in the child. The parent ends the child's process group on SIGTERM, and follows the child."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child:
        _follow(child)
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _follow(child: int) -> NoReturn:
    with contextlib.suppress(OSError):  # it has done so itself and ended
        os.setpgid(child, child)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.killpg(child, signal.SIGKILL)  # the group exists until the child is reaped
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ChildProcessError):
        while os.getpid() != 1:
            os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _mount_folder(path: str, size: int, uid: int) -> None:
    options = f"size={size},nr_inodes=1024,mode=700,uid={uid},gid={os.getgid() if uid == os.getuid() else uid}"
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", 2 | 4, options.encode())  # no set-uid files, no devices
    os.chdir(path)


def _limit(kind: int, limit: int) -> None:
    highest = resource.getrlimit(kind)[1]
    limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
    resource.setrlimit(kind, (limit, limit))


def _drop_privileges(uid: int | None) -> None:
    """Becomes another user if one is given, and gives up every capability for good."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_CAP_AMBIENT, 4)
    header = struct.pack("Ii", 0x20080522, 0)
    _call("capset", header, bytes(24))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it


def _landlock(readable: list[str], folder: str | None) -> None:
    """Leaves reading of these paths, all rights in the folder, and `/dev/null`."""
    abi = LIBC.syscall(444, None, 0, 1)
    if abi < 1:
        raise OSError(ctypes.get_errno(), "the kernel has no Landlock")
    everything = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    attributes = struct.pack("QQQ", everything, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    rules = _call("syscall", 444, attributes, 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    read, read_folder, write = 1 | 4, 8, 2
    for path in readable:
        if os.path.exists(path):
            _allow(rules, path, read | (read_folder if os.path.isdir(path) else 0))
    for path, rights in (("/dev/null", 4 | write), ("/dev/zero", 4), ("/dev/urandom", 4)):
        _allow(rules, path, rights)
    if folder is not None:
        _allow(rules, folder, everything)
    _call("syscall", 446, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _call("syscall", 445, rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _seccomp(denied: str, single_process: bool) -> None:
    """Installs a filter of system calls, for this process and all that it starts."""
    if os.uname().machine not in ARCHITECTURES:
        raise OSError(f"no filter of system calls for {os.uname().machine}")
    architecture, column = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    error, kill, allow = 0x00050000, 0x80000000, 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:  # the x32 interface has other numbers
        code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    for number in (call.split()[1 + column] for call in denied.split(",")):
        if number != "-":
            code += [(equal, 0, 1, int(number)), (answer, 0, 0, error | EPERM)]
    code += [(equal, 0, 1, CLONE3[column]), (answer, 0, 0, error | ENOSYS)]  # the C library then uses clone

    def deny(call: tuple[int, int], argument: int, test: int, value: int, *, unless: bool = False) -> None:
        code.extend([(equal, 0, 4, call[column]), (load, 0, 0, 16 + 8 * argument)])
        code.extend([(test, 1, 0, value) if unless else (test, 0, 1, value)])
        code.extend([(answer, 0, 0, error | EPERM), (load, 0, 0, 0)])

    deny(CLONE, 0, any_bit, CLONE_NEW)
    if single_process:
        deny(CLONE, 0, any_bit, CLONE_THREAD, unless=True)
    deny(SOCKETPAIR, 0, equal, 1, unless=True)  # AF_UNIX
    deny(PRLIMIT, 0, equal, 0, unless=True)  # of itself
    deny(PRCTL, 0, equal, PR_SET_PDEATHSIG)
    for operation in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals through files
        deny(FCNTL, 1, equal, operation)
    for operation in (0x8901, 0x8902, 0x5412, 0x541C):  # FIOSETOWN, SIOCSPGRP; TIOCSTI, TIOCLINUX: keys of a terminal
        deny(IOCTL, 1, equal, operation)
    code.append((answer, 0, 0, allow))
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)))
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


if __name__ == "__main__":
    main()
    sys.exit(0)
