"""Programs that try to escape from the sandbox. Each prints, as JSON, the names of the attempts that succeeded."""

import platform

PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
succeeded = []
def attempt(name, function):
    try:
        result = function()
    except (OSError, MemoryError, AttributeError, ImportError, ValueError):
        return
    if result is not False:
        succeeded.append(name)
def call(*arguments):
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""
END = "\nprint(json.dumps(succeeded))\n"


def program(body: str, **values: object) -> str:
    """Return the whole program; `values` become its variables."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return f"{PRELUDE}{given}{body}{END}"


NETWORK = """
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, 40, 38):
        attempt(f"socket {family} {kind}", lambda: socket.socket(family, kind))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", tcp), timeout=2))
attempt("dns", lambda: socket.getaddrinfo("example.com", 80))
attempt("hosts file", lambda: socket.gethostbyname("localhost"))
left, right = socket.socketpair()
attempt("abstract by pair", lambda: left.connect(chr(0) + name))
attempt("path by pair", lambda: left.connect(path))
attempt("send by pair", lambda: left.sendto(b"x", chr(0) + name))
attempt("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt("listen", lambda: (left.bind(chr(0) + "mine"), left.listen()))
assert left.send(b"works") and right.recv(9) == b"works"
"""

FILES = """
for path in paths:
    attempt("read " + path, lambda: open(path, "rb").read(1))
    attempt("list " + path, lambda: os.listdir(path))
    attempt("open for path " + path, lambda: os.listdir(os.open(path, os.O_PATH)))
    attempt("write " + path, lambda: open(path, "ab").write(b"x"))
    attempt("truncate " + path, lambda: os.truncate(path, 0))
    attempt("mode " + path, lambda: os.chmod(path, 0o777))
    attempt("owner " + path, lambda: os.chown(path, os.getuid(), os.getgid()))
    attempt("times " + path, lambda: os.utime(path))
    attempt("attribute " + path, lambda: os.setxattr(path, "user.x", b"1"))
    attempt("rename " + path, lambda: os.rename(path, path + ".moved"))
    attempt("remove " + path, lambda: os.unlink(path))
    attempt("link " + path, lambda: os.link(path, "/tmp/link") or open("/tmp/link").close())
    attempt("symlink " + path, lambda: os.symlink(path, "/tmp/soft" + str(len(path))) or open("/tmp/soft" + str(len(path))).close())
    attempt("from the root up " + path, lambda: open("/tmp/../../.." + path).close())
for folder in folders:
    attempt("create in " + folder, lambda: open(folder + "/escaped", "w").close())
    attempt("folder in " + folder, lambda: os.mkdir(folder + "/escaped-folder"))
    attempt("nameless in " + folder, lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR))
attempt("the environment", lambda: secret in str(os.environ))
"""

PROC = """
for pid in ("1", "self", "thread-self", str(parent)):
    for name in ("environ", "mem", "maps", "root", "cwd", "fd", "cmdline", "root/etc/passwd", "ns/mnt"):
        attempt(f"/proc/{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
        attempt(f"list /proc/{pid}/{name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
attempt("processes", lambda: any(name.isdigit() for name in os.listdir("/proc")))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname", "/sys/power/state",
             "/sys/kernel/uevent_helper", "/proc/self/oom_score_adj", "/sys/fs/cgroup/cgroup.procs"):
    attempt("open " + path, lambda: os.open(path, os.O_WRONLY))
attempt("/sys", lambda: os.listdir("/sys"))
"""

DEVICES = """
for number, name in enumerate(("/dev/mem", "/dev/kmem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/tty", "/dev/console",
                               "/dev/fuse", "/dev/kvm", "/dev/ptmx", "/dev/loop-control", "/dev/userfaultfd")):
    attempt("open " + name, lambda: os.open(name, os.O_RDWR))
    attempt("read " + name, lambda: os.open(name, os.O_RDONLY))
for folder in ("/tmp", "/", "/dev"):
    attempt("make a device in " + folder, lambda: os.mknod(folder + "/device", 0o600 | 0x6000, os.makedev(1, 1)))
    attempt("make a disk in " + folder, lambda: os.mknod(folder + "/disk", 0o600 | 0x6000, os.makedev(8, 0)))
attempt("write to urandom", lambda: os.write(os.open("/dev/urandom", os.O_WRONLY), b"x") and machine_changes)
open("/dev/null", "w").write("works")
assert open("/dev/urandom", "rb").read(3)
"""

MOUNTS = """
attempt("mount", lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("bind", lambda: libc.mount(b"/", b"/tmp", None, 4096, None) == 0)
attempt("remount", lambda: libc.mount(b"none", b"/usr", None, 32 | 4096, None) == 0)
attempt("umount", lambda: libc.umount2(b"/proc", 2) == 0)
attempt("umount tmp", lambda: libc.umount2(b"/tmp", 2) == 0)
attempt("chroot", lambda: os.chroot("/usr"))
for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
    attempt(f"unshare {flag:#x}", lambda: libc.unshare(flag | 0x10000000) == 0)
    attempt(f"unshare only {flag:#x}", lambda: libc.unshare(flag) == 0)
    def clone():
        pid = call(numbers["clone"], flag | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    attempt(f"clone {flag:#x}", clone)
attempt("clone3", lambda: call(numbers["clone3"], ctypes.create_string_buffer(88), 88))
for name in ("pivot_root", "setns", "open_tree", "move_mount", "fsopen", "fsmount", "mount_setattr", "fspick"):
    attempt(name, lambda: call(numbers[name], 0, 0, 0, 0, 0))
"""

KERNEL = """
for name in refused:
    try:
        call(numbers[name], 0, 0, 0, 0, 0, 0)
        succeeded.append(name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            succeeded.append(f"{name}: {error.errno}")
attempt("dumpable", lambda: libc.prctl(4, 1, 0, 0, 0) == 0)
attempt("outlive the parent", lambda: libc.prctl(1, 0, 0, 0, 0) == 0)
attempt("subreaper", lambda: libc.prctl(36, 1, 0, 0, 0) == 0)
attempt("keep capabilities", lambda: libc.prctl(8, 1, 0, 0, 0) == 0)
import resource
for limit in ("AS", "NPROC", "FSIZE", "CPU", "CORE", "NOFILE"):
    attempt("limit " + limit, lambda: resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (-1, -1)))
attempt("terminal input", lambda: libc.ioctl(0, 0x5412, b"x") == 0)
"""
REFUSED = [
    "ptrace",
    "bpf",
    "perf_event_open",
    "keyctl",
    "add_key",
    "request_key",
    "kexec_load",
    "process_vm_readv",
    "process_vm_writev",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "userfaultfd",
    "memfd_create",
    "shmget",
    "shmat",
    "msgget",
    "semget",
    "mq_open",
    "personality",
    "open_by_handle_at",
    "name_to_handle_at",
    "init_module",
    "finit_module",
    "delete_module",
    "reboot",
    "swapon",
    "settimeofday",
    "clock_settime",
    "sethostname",
    "acct",
    "quotactl",
    "syslog",
    "pidfd_open",
    "pidfd_getfd",
    "pidfd_send_signal",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "kcmp",
    "fanotify_init",
    "inotify_init1",
    "vmsplice",
    "splice",
    "tee",
    "migrate_pages",
    "move_pages",
    "setpriority",
    "ioprio_set",
    "sched_setscheduler",
    "sched_setaffinity",
    "seccomp",
    "landlock_create_ruleset",
    "memfd_secret",
    "execveat",
    "process_madvise",
    "setuid",
    "setgid",
    "setresuid",
    "setresgid",
    "setgroups",
    "capset",
    "bind",
    "connect",
    "listen",
    "accept",
    "socket",
    "adjtimex",
    "lookup_dcookie",
]

SIGNALS = """
for pid in targets + [os.getppid()]:
    if pid > 1:
        attempt(f"kill {pid}", lambda: os.kill(pid, signal.SIGKILL))
        attempt(f"stop group {pid}", lambda: os.killpg(pid, signal.SIGSTOP))
        attempt(f"renice {pid}", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
        attempt(f"affinity {pid}", lambda: os.sched_setaffinity(pid, {0}))
        attempt(f"queue {pid}", lambda: call(numbers["rt_sigqueueinfo"], pid, 9, ctypes.create_string_buffer(128)))
        attempt(f"thread {pid}", lambda: call(numbers["tkill"], pid, 9))
        attempt(f"owner {pid}", lambda: __import__("fcntl").fcntl(0, 8, pid))
        attempt(f"trace {pid}", lambda: call(numbers["ptrace"], 16, pid, 0, 0))
        attempt(f"limits {pid}", lambda: __import__("resource").prlimit(pid, 7, (0, 0)))
        attempt(f"read {pid}", lambda: call(numbers["process_vm_readv"], pid, 0, 0, 0, 0, 0))
attempt("signal everybody", lambda: os.kill(-1, 0) if os.getpid() != 1 else False)
"""

QUESTIONS = """
import fcntl, resource, struct
for pid in targets:
    attempt(f"group of {pid}", lambda: os.getpgid(pid))
    attempt(f"session of {pid}", lambda: os.getsid(pid))
    attempt(f"processors of {pid}", lambda: os.sched_getaffinity(pid))
    attempt(f"scheduler of {pid}", lambda: os.sched_getscheduler(pid))
    attempt(f"parameters of {pid}", lambda: os.sched_getparam(pid))
    attempt(f"priority of {pid}", lambda: os.getpriority(os.PRIO_PROCESS, pid))
    attempt(f"limits of {pid}", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
    clock = (~pid << 3) | 2
    attempt(f"clock of {pid}", lambda: time.clock_gettime(clock))
    attempt(f"precision of {pid}'s clock", lambda: time.clock_getres(clock))
    attempt(f"timer on {pid}'s clock", lambda: libc.timer_create(clock, None, ctypes.create_string_buffer(8)) == 0)
    attempt(f"sleep by {pid}'s clock", lambda: libc.clock_nanosleep(clock, 0, struct.pack("qq", 0, 1), None) == 0)
os.getpgid(0), os.getsid(os.getpid()), os.sched_getaffinity(0), time.process_time(), time.thread_time()
resource.getrlimit(resource.RLIMIT_NOFILE), resource.prlimit(os.getpid(), resource.RLIMIT_CPU)
"""

CHANNEL = """
import fcntl
jailer = socket.socket(fileno=os.dup(3))
left, right = socket.socketpair()
for option in (17, 31, 59, 77):  # SO_PEERCRED, SO_PEERSEC, SO_PEERGROUPS, SO_PEERPIDFD
    attempt(f"option {option}", lambda: jailer.getsockopt(socket.SOL_SOCKET, option, 64))
for end, name in ((jailer, "jailer"), (left, "pair")):
    attempt(f"descriptors to the {name}", lambda: socket.send_fds(end, [b"x"], [0] * 200))
    attempt(f"out of band to the {name}", lambda: end.send(b"x", socket.MSG_OOB))
    attempt(f"credentials from the {name}", lambda: end.setsockopt(socket.SOL_SOCKET, 16, 1))
attempt("size of a pipe", lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20))
assert left.send(b"works") and right.recv(9) == b"works"
"""

SETUID = """
attempt("root", lambda: os.setuid(0))
attempt("any root", lambda: os.setresuid(0, 0, 0))
attempt("effective root", lambda: os.geteuid() == 0)
attempt("group", lambda: os.setgid(0))
for path in ("/bin/su", "/usr/bin/su", "/usr/bin/mount", "/usr/bin/passwd", "/usr/bin/newuidmap", "/usr/bin/sudo",
             "/usr/bin/chsh", "/bin/ping"):
    attempt("exists " + path, lambda: os.access(path, os.X_OK) and own_files)
    def run():
        pid = os.fork()
        if pid == 0:
            try:
                os.execv(path, [path, "--version"])
            finally:
                os._exit(77)
        return os.waitpid(pid, 0)[1] != 77 << 8
    attempt("run " + path, run)
def setuid_file():
    with open("/tmp/mine", "wb") as file:
        file.write(open(sys.executable, "rb").read(1000))
    os.chmod("/tmp/mine", 0o4777)
    os.execv("/tmp/mine", ["mine"])
attempt("run own file", setuid_file)
"""

_X86_64 = (
    "ptrace 101 bpf 321 perf_event_open 298 keyctl 250 add_key 248 request_key 249 kexec_load 246 process_vm_readv 310 "
    "process_vm_writev 311 userfaultfd 323 memfd_create 319 shmget 29 shmat 30 msgget 68 semget 64 mq_open 240 "
    "personality 135 open_by_handle_at 304 name_to_handle_at 303 init_module 175 finit_module 313 delete_module 176 "
    "reboot 169 swapon 167 settimeofday 164 clock_settime 227 sethostname 170 acct 163 quotactl 179 syslog 103 "
    "rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 kcmp 312 fanotify_init 300 inotify_init1 294 vmsplice 278 splice 275 "
    "tee 276 migrate_pages 256 move_pages 279 setpriority 141 ioprio_set 251 sched_setscheduler 144 "
    "sched_setaffinity 203 seccomp 317 execveat 322 setuid 105 setgid 106 setresuid 117 setresgid 119 setgroups 116 "
    "capset 126 bind 49 connect 42 listen 50 accept 43 socket 41 adjtimex 159 lookup_dcookie 212 clone 56 tkill 200 "
    "pivot_root 155 setns 308"
)
_AARCH64 = (
    "ptrace 117 bpf 280 perf_event_open 241 keyctl 219 add_key 217 request_key 218 kexec_load 104 process_vm_readv 270 "
    "process_vm_writev 271 userfaultfd 282 memfd_create 279 shmget 194 shmat 196 msgget 186 semget 190 mq_open 180 "
    "personality 92 open_by_handle_at 265 name_to_handle_at 264 init_module 105 finit_module 273 delete_module 106 "
    "reboot 142 swapon 224 settimeofday 170 clock_settime 112 sethostname 161 acct 89 quotactl 60 syslog 116 "
    "rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 kcmp 272 fanotify_init 262 inotify_init1 26 vmsplice 75 splice 76 "
    "tee 77 migrate_pages 238 move_pages 239 setpriority 140 ioprio_set 30 sched_setscheduler 119 "
    "sched_setaffinity 122 seccomp 277 execveat 281 setuid 146 setgid 144 setresuid 147 setresgid 149 setgroups 159 "
    "capset 91 bind 200 connect 203 listen 201 accept 202 socket 198 adjtimex 171 lookup_dcookie 18 clone 220 tkill 130 "
    "pivot_root 41 setns 268"
)
_BOTH = (
    "io_uring_setup 425 io_uring_enter 426 io_uring_register 427 pidfd_open 434 pidfd_getfd 438 pidfd_send_signal 424 "
    "landlock_create_ruleset 444 memfd_secret 447 process_madvise 440 clone3 435 open_tree 428 move_mount 429 fsopen 430 "
    "fsmount 432 fspick 433 mount_setattr 442"
)


def numbers() -> dict[str, int]:
    """Return the system call numbers of this machine."""
    words = f"{_X86_64 if platform.machine() == 'x86_64' else _AARCH64} {_BOTH}".split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))
