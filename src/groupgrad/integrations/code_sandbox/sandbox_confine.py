"""Script that confines its own process, then runs a program in it. The interpreter gets this source with `-c`.

Only the standard library is used, since nothing else has to exist in a sandbox. `sandbox.py` writes the
specification to standard input: twelve digits with its length, then its bytes. The rest of standard input is left for
the program. The script writes "ready" to standard output when the process is confined, then starts the program.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 22, 38, 47
CLONE_NEWUSER, CLONE_THREAD, CLONE_NEW = 0x10000000, 0x00010000, 0x7E020080
NAMESPACES = 0x20000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, host name, System V IPC, processes, network."""

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Number of the architecture in seccomp, and its column in the numbers of system calls."""
DENIED = """
unshare 272 97, memfd_create 319 279, shmget 29 194, semget 64 190, msgget 68 186, socket 41 198,
io_uring_setup 425 425, add_key 248 217, request_key 249 218, keyctl 250 219
"""
"""Calls that neither namespaces nor limits bound: memory outside of the address space (mounts in further namespaces,
files and System V IPC in memory), sockets to the host of a virtual machine, and keys of the trainer's session."""
CLONE, CLONE3, EPERM, ENOSYS = (56, 220), (435, 435), 1, 38


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
    """Drops every right that the sandbox takes away. Returns only in the process that will run the program."""
    if spec["mechanism"] == "namespaces":  # bubblewrap has done these three before it started this script
        _enter_namespaces(spec["parent"])
        _fork_first_process()
        _change_root(spec["readable"])
    os.setsid()  # a signal to its own process group would reach the processes that end the sandbox
    _mount_folder(spec["folder"], spec["folder_bytes"], spec["uid"])
    for name, limit in spec["limits"].items():
        _limit(getattr(resource, name), limit)
    _drop_privileges(spec["uid"])
    _deny_calls(spec["single_process"])


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


def _enter_namespaces(trainer: int) -> None:
    """Enters new namespaces; without root, through a user namespace in which the user keeps its number."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != trainer:
        os._exit(1)  # the trainer ended before the line above
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", NAMESPACES | (CLONE_NEWUSER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _fork_first_process() -> None:
    """Returns in a child of the namespace's first process. With that process, the kernel ends all others.

    The process that the trainer knows stays outside. It ends the first one on SIGTERM, or by its own end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the handler below knows whom to end
    first = os.fork()
    if first:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _end_with(first)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    program = os.fork()
    if program:
        _end_with(program)


def _end_with(child: int) -> NoReturn:
    """Waits for the end of a child, and ends with its code. Orphans of the namespace are waited for meanwhile."""
    process, status = os.wait()
    while process != child:
        process, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _change_root(readable: list[str]) -> None:
    """Makes a root in memory that holds these paths, all of it read-only, and leaves the root of the machine."""
    private, bind, move, root = 0x4000 | 0x40000, 0x1000 | 0x4000, 0x2000, "/proc"  # /proc holds no interpreter
    _call("mount", None, b"/", None, private, None)  # no mount below reaches the machine
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", 2 | 4, b"size=1m,mode=755")
    os.umask(0o022)  # whatever the trainer's: another user passes through these folders
    os.mkdir(root + "/box")
    for path in readable:
        os.makedirs(root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
        if not os.path.isdir(path):
            os.close(os.open(root + path, os.O_CREAT, 0o644))
        _call("mount", path.encode(), (root + path).encode(), None, bind, None)
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # read-only, no set-uid files
    _call("syscall", 442, -100, root.encode(), 0x8000, attributes, len(attributes))  # mount_setattr of all below
    os.chdir(root)
    _call("mount", root.encode(), b"/", None, move, None)  # over the root of the machine, which has no name any more
    os.chroot(".")  # unlike pivot_root, a container with the capability of mounts allows it


def _mount_folder(path: str, size: int, uid: int | None) -> None:
    owner = f"uid={os.getuid() if uid is None else uid},gid={os.getgid() if uid is None else uid}"
    options = f"size={size},nr_inodes=1024,mode=700,{owner}"
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
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it


def _deny_calls(single_process: bool) -> None:
    """Installs a filter of system calls, for this process and all that it starts."""
    if os.uname().machine not in ARCHITECTURES:
        raise OSError(f"no filter of system calls for {os.uname().machine}")
    architecture, column = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    error, kill, allow = 0x00050000, 0x80000000, 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    numbers = [int(call.split()[1 + column]) for call in DENIED.split(",")]
    if column == 0:  # the x32 interface has other numbers; fork and vfork exist on this architecture only
        code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
        numbers += [57, 58] if single_process else []
    for number in numbers:
        code += [(equal, 0, 1, number), (answer, 0, 0, error | EPERM)]
    code += [(equal, 0, 1, CLONE3[column]), (answer, 0, 0, error | ENOSYS)]  # the C library then uses clone
    code += [(equal, 1, 0, CLONE[column]), (answer, 0, 0, allow), (load, 0, 0, 16)]
    code += [(any_bit, 0, 1, CLONE_NEW), (answer, 0, 0, error | EPERM)]
    if single_process:
        code += [(any_bit, 1, 0, CLONE_THREAD), (answer, 0, 0, error | EPERM)]
    code += [(answer, 0, 0, allow)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)))
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


if __name__ == "__main__":
    main()
    sys.exit(0)
