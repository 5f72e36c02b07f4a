"""Makes this Linux look like another system, before the package is imported: what Python lacks there is taken away.

    python elsewhere.py darwin program.py
    python elsewhere.py win32 -c "import globaltensor"
"""
import builtins
import ctypes.util  # noqa: F401  (Debian's Python has not what it imports on a Mac)
import mmap
import os
import runpy
import shutil
import signal
import socket
import sys
import sysconfig
import time

import torch.distributed  # noqa: F401  (torch itself is as it is here)

LINUX = {
    os: "memfd_create sched_getaffinity sched_setaffinity pidfd_open posix_fallocate posix_fadvise eventfd setns "
        "unshare waitid getrandom sendfile copy_file_range splice",
    signal: "SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo pidfd_send_signal", time: "CLOCK_BOOTTIME",
    socket: "AF_NETLINK AF_PACKET SO_PEERCRED AF_VSOCK"}
UNIX = {
    os: "fork forkpty register_at_fork getuid geteuid getgid getegid getgroups killpg setsid getpgid sysconf "
        "sysconf_names statvfs fstatvfs mkfifo chown fchown fchmod getloadavg uname wait4 wait3 confstr nice "
        "getpriority openpty ctermid sync O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_NONBLOCK O_SYNC pread pwrite readv preadv "
        "writev pwritev",
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGSTOP SIGCONT SIGQUIT SIGCHLD SIGALRM SIGPIPE SIGTSTP SIGBUS "
            "pthread_kill pthread_sigmask alarm setitimer siginterrupt sigwait pause",
    socket: "AF_UNIX socketpair send_fds recv_fds CMSG_LEN CMSG_SPACE SCM_RIGHTS",
    time: "clock_gettime clock_settime tzset CLOCK_MONOTONIC CLOCK_REALTIME"}
MODULES = "fcntl resource pwd grp termios pty tty syslog posix readline rich".split()


def take_away(platform: str) -> None:
    """What Python lacks on that platform."""
    for module, names in [*LINUX.items(), *(UNIX.items() if platform == "win32" else ())]:
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    if platform == "win32":
        import faulthandler

        del faulthandler.register
        shutil._use_fd_functions = False             # rmtree opens no folders there
        for name in [name for name in vars(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))]:
            delattr(mmap, name)
        for name in MODULES:
            sys.modules[name] = None
    sysconfig.get_config_vars()                      # read once: they are of the real system
    sys.platform = platform
    hide_files(platform)


def hide_files(platform: str) -> None:
    """There is no /proc, and no /dev/shm. Windows opens no folders."""
    def hidden(path: object) -> bool:
        return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(("/proc", "/dev/shm"))

    os_open = os.open

    def guarded(real):
        def call(path, *rest, **how):
            if platform == "win32" and real is os_open and os.path.isdir(path):
                raise PermissionError(13, "Permission denied", os.fsdecode(path))
            if hidden(path):
                raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
            return real(path, *rest, **how)
        return call

    for module, names in ((os, ("open", "stat", "lstat", "listdir", "scandir", "readlink")), (builtins, ("open",))):
        for name in names:
            setattr(module, name, guarded(getattr(module, name)))


if __name__ == "__main__":
    platform, *rest = sys.argv[1:]
    sys.argv = rest
    take_away(platform)
    sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
    runpy.run_path(rest[0], run_name="__main__")
