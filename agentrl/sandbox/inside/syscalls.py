"""Numbers of the system calls that the sandbox knows, for x86_64 and for the generic table of aarch64.

1. `BASE`: harmless in any process: memory, its own files, time, waiting.
2. `OWN_VIEW`: also allowed if the process has a file tree and a process tree of its own (namespaces).
3. `CHECKED`: allowed with certain arguments only; `filters` holds the conditions.

Each name has its number on x86_64, then on aarch64 unless aarch64 lacks the call. Source: the kernel's stable ABI."""

_BASE = """
    read=0,63 write=1,64 readv=19,65 writev=20,66 pread64=17,67 pwrite64=18,68 preadv=295,69 pwritev=296,70
    preadv2=327,286 pwritev2=328,287 close=3,57 close_range=436,436 dup=32,23 dup2=33 dup3=292,24 pipe=22 pipe2=293,59
    open=2 openat=257,56 stat=4 fstat=5,80 lstat=6 newfstatat=262,79 statx=332,291 access=21 faccessat=269,48
    faccessat2=439,439 readlink=89 readlinkat=267,78 getdents=78 getdents64=217,61 lseek=8,62 getcwd=79,17 chdir=80,49
    fchdir=81,50 statfs=137,43 fstatfs=138,44 fadvise64=221,223 poll=7 ppoll=271,73 select=23 pselect6=270,72
    epoll_create=213 epoll_create1=291,20 epoll_ctl=233,21 epoll_wait=232 epoll_pwait=281,22 epoll_pwait2=441,441
    eventfd=284 eventfd2=290,19 timerfd_create=283,85 timerfd_settime=286,86 timerfd_gettime=287,87 signalfd=282
    signalfd4=289,74 mmap=9,222 mprotect=10,226 munmap=11,215 mremap=25,216 brk=12,214 madvise=28,233 msync=26,227
    membarrier=324,283 rt_sigaction=13,134 rt_sigprocmask=14,135 rt_sigreturn=15,139 rt_sigpending=127,136
    rt_sigsuspend=130,133 rt_sigtimedwait=128,137 sigaltstack=131,132 restart_syscall=219,128 pause=34 futex=202,98
    futex_waitv=449,449 set_robust_list=273,99 rseq=334,293 set_tid_address=218,96 gettid=186,178 getpid=39,172
    getppid=110,173 getuid=102,174 geteuid=107,175 getgid=104,176 getegid=108,177 getresuid=118,148 getresgid=120,150
    getgroups=115,158 getpgrp=111 exit=60,93 exit_group=231,94 wait4=61,260 waitid=247,95 nanosleep=35,101
    gettimeofday=96,169 time=201 times=100,153 getrusage=98,165 sysinfo=99,179 uname=63,160 getcpu=309,168
    sched_yield=24,124 sched_get_priority_max=146,125 sched_get_priority_min=147,126 getrandom=318,278 getrlimit=97,163
    umask=95,166 alarm=37 getitimer=36,102 setitimer=38,103 timer_settime=223,110 timer_gettime=224,108
    timer_delete=226,111 timer_getoverrun=225,109 arch_prctl=158 recvfrom=45,207 recvmsg=47,212 shutdown=48,210
    getsockname=51,204 getpeername=52,205 sendfile=40,71
"""
_OWN_VIEW = """
    creat=85 ftruncate=77,46 truncate=76,45 fallocate=285,47 mkdir=83 mkdirat=258,34 unlink=87 unlinkat=263,35 rmdir=84
    rename=82 renameat=264,38 renameat2=316,276 link=86 linkat=265,37 symlink=88 symlinkat=266,36 fsync=74,82
    fdatasync=75,83 chmod=90 fchmod=91,52 fchmodat=268,53 fchmodat2=452,452 utimensat=280,88 utime=132 utimes=235
    futimesat=261 copy_file_range=326,285 fork=57 vfork=58 execve=59,221 setsid=112,157 setpgid=109,154
"""
_CHECKED = """
    kill=62,129 tkill=200,130 tgkill=234,131 socketpair=53,199 sendto=44,206 prctl=157,167 ioctl=16,29 fcntl=72,25
    clone=56,220 clone3=435,435 prlimit64=302,261 getpgid=121,155 getsid=124,156 sched_getaffinity=204,123
    sched_getparam=143,121 sched_getscheduler=145,120 getpriority=140,141 clock_gettime=228,113 clock_getres=229,114
    clock_nanosleep=230,115 timer_create=222,107 getsockopt=55,209 flock=73,32
"""


def _read(table: str) -> dict[str, dict[str, int]]:
    entries = [entry.partition("=")[::2] for entry in table.split()]
    numbers = [(name, list(map(int, pair.split(",")))) for name, pair in entries]
    by_machine = ({name: found[at] for name, found in numbers if at < len(found)} for at in (0, 1))
    return dict(zip(("x86_64", "aarch64"), by_machine, strict=True))


BASE, OWN_VIEW, CHECKED = map(_read, (_BASE, _OWN_VIEW, _CHECKED))
