"""How `sandbox_child.py` is kept apart from the machine: by namespaces, or else by Landlock.

Namespaces: a private root that holds the interpreter's libraries read-only and an empty /tmp in memory, no network,
own process ids. Landlock, for containers that forbid namespaces: the kernel refuses every read and write outside the
libraries and the temporary directory, TCP (version 4) and signals to others (version 6). Standard library only.
"""

import ctypes
import os
import platform
import signal
import sys

# <sched.h>, <sys/mount.h>, <sys/prctl.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, AT_RECURSIVE, AT_FDCWD = 1, 2, 4, 0x8000, -100
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 36, 38
CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2

# System calls that libc does not wrap. Numbers from 424 on are the same on every architecture.
SYS_PIVOT_ROOT = {'x86_64': 155, 'aarch64': 41}
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446

READ_FILE, READ_DIR, REFER, TRUNCATE, IOCTL_DEV = 1 << 2, 1 << 3, 1 << 13, 1 << 14, 1 << 15
FILE_RIGHTS = 1 << 1 | READ_FILE | TRUNCATE | IOCTL_DEV  # all that Landlock can grant on something not a directory

SYSTEM_LIBRARIES = ('/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache')
DEVICES = ('/dev/null', '/dev/zero', '/dev/random', '/dev/urandom')
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args) -> int:
  """A libc function by name; raises OSError with its name where it fails."""
  result = getattr(libc, name)(*args)
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{name}: {os.strerror(number)}')
  return result


def mount(source: str, target: str, kind: str, flags: int, data: str = ''):
  call('mount', os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())


def libraries(request: dict) -> list[str]:
  """What an interpreter needs to read: no path twice, none inside another."""
  candidates = [os.path.join(sys.base_prefix, 'lib'), *sys.path, *request['libraries'], *SYSTEM_LIBRARIES]
  kept = []
  for path in sorted({os.path.abspath(path) for path in candidates if os.path.exists(path)}, key=len):
    if not any(path.startswith(outer + '/') for outer in kept):
      kept.append(path)
  return kept


# Users


def unprivileged_id() -> int:
  """A user id that owns nothing: from the range that systemd keeps for such throw-away users, one per launcher."""
  return 61184 + os.getpid() % 4000


def become(uid: int):
  """Root must: the kernel does not limit the processes of user 0."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)
  call('prctl', PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self/uid_map belongs to root


def set_capabilities(mask: int):
  call('capset', (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)(mask, mask))


def drop_capabilities():
  """No capability is left, none can come back through an executable, and no equal may trace this process."""
  call('prctl', PR_SET_DUMPABLE, 0, 0, 0, 0)
  call('prctl', PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  set_capabilities(0)


def die_with_parent():
  call('prctl', PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def prefer_for_oom_kill():
  try:
    with open('/proc/self/oom_score_adj', 'w') as file:
      file.write('1000')
  except OSError:
    pass  # a preference, not a protection


# Mode 'namespaces'


def enter_namespaces(directory: str) -> int | None:
  """Leaves the caller's mounts, network, process ids and IPC. Returns the user to become later, if any."""
  flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
  if os.geteuid() == 0:
    uid = unprivileged_id()
    try:
      call('unshare', flags)
      return uid
    except PermissionError:
      os.chown(directory, uid, uid)
      become(uid)
  uid, gid = os.getuid(), os.getgid()
  call('unshare', flags | CLONE_NEWUSER)
  for name, text in (('setgroups', 'deny'), ('uid_map', f'{uid} {uid} 1'), ('gid_map', f'{gid} {gid} 1')):
    with open(f'/proc/self/{name}', 'w') as file:
      file.write(text)
  return None


def bind(path: str, root: str, read_only: bool = True):
  """Shows `path` at the same place under `root`."""
  target = root + path
  if os.path.islink(path) and path in SYSTEM_LIBRARIES:  # /lib -> usr/lib
    os.makedirs(os.path.dirname(target), exist_ok=True)
    return os.symlink(os.readlink(path), target)
  if os.path.isdir(path):
    os.makedirs(target, exist_ok=True)
  else:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT, 0o644))
  mount(path, target, 'none', MS_BIND | MS_REC)
  if read_only:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    call('syscall', SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, 32)


def enter_private_root(request: dict, uid: int | None):
  """Replaces / by a memory file system: libraries read-only, four devices, an empty /tmp. The old root is gone."""
  root = request['directory']
  mount('none', '/', 'none', MS_REC | MS_PRIVATE)
  mount('tmpfs', root, 'tmpfs', MS_NOSUID | MS_NODEV, f'size={request["disk_bytes"]},nr_inodes=4096,mode=0755')
  for path in libraries(request):
    bind(path, root)
  for path in DEVICES:
    bind(path, root, read_only=False)
  work = root + '/tmp'
  os.makedirs(work, exist_ok=True)  # it exists where the libraries are below /tmp
  if uid is not None:
    os.chown(work, uid, uid)
  os.chdir(root)
  call('syscall', SYS_PIVOT_ROOT[platform.machine()], b'.', b'.')
  call('umount2', b'.', MNT_DETACH)
  os.chdir('/tmp')


def isolate_by_namespaces(request: dict) -> dict:
  """Returns in the monitor only; the launcher waits for it and ends."""
  prefer_for_oom_kill()
  uid = enter_namespaces(request['directory'])
  monitor = os.fork()
  if monitor:
    os.close(request['report_fd'])
    os.waitpid(monitor, 0)
    os._exit(0)
  enter_private_root(request, uid)
  if uid is not None:
    become(uid)
  drop_capabilities()
  die_with_parent()  # after the change of user, which clears it
  return {'files': 'private read-only root', 'network': 'none (namespace)', 'processes': 'own pid namespace'}


# Mode 'landlock'


def restrict_files(request: dict, abi: int):
  """Landlock: libraries and null devices readable, the temporary directory free, nothing else (landlock(7))."""
  handled = (1 << 13) - 1 | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
  tcp, scopes = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
  size = 24 if abi >= 6 else 16 if abi >= 4 else 8
  attributes = (ctypes.c_uint64 * 3)(handled, tcp, scopes)
  ruleset = call('syscall', SYS_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
  rules = [(path, READ_FILE | READ_DIR) for path in libraries(request)]
  rules += [(path, FILE_RIGHTS) for path in DEVICES] + [(request['directory'], handled)]
  for path, rights in rules:
    rights &= handled if os.path.isdir(path) else handled & FILE_RIGHTS
    parent = os.open(path, os.O_PATH)
    rule = rights.to_bytes(8, sys.byteorder) + parent.to_bytes(4, sys.byteorder)
    call('syscall', SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)
    os.close(parent)
  call('syscall', SYS_LANDLOCK_RESTRICT, ruleset, 0)
  os.close(ruleset)


def isolate_by_landlock(request: dict) -> dict:
  """The monitor stays as it is; `confine_program` narrows the program. Fails where the kernel has no Landlock."""
  abi = call('syscall', SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
  call('prctl', PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  os.chdir(request['directory'])
  if os.geteuid() == 0:
    request['uid'] = unprivileged_id()
    os.chown(request['directory'], request['uid'], request['uid'])
  request['landlock_abi'] = abi
  network = 'refused (Landlock and audit hook)' if abi >= 4 else 'refused (audit hook)'
  return {'files': 'Landlock', 'network': network, 'processes': 'none allowed (audit hook)'}


def become_reader(uid: int):
  """Like `become`, but an interpreter below root's home stays readable where root may grant that."""
  call('prctl', PR_SET_KEEPCAPS, 1, 0, 0, 0)
  become(uid)
  try:
    set_capabilities(CAP_DAC_READ_SEARCH)  # of what Landlock leaves readable
  except PermissionError:
    set_capabilities(0)


def confine_program(request: dict):
  """What remains to be done in the program's own process, before it starts."""
  if 'landlock_abi' in request:
    prefer_for_oom_kill()
    if 'uid' in request:
      become_reader(request['uid'])
    call('prctl', PR_SET_DUMPABLE, 0, 0, 0, 0)
    call('prctl', PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restrict_files(request, request['landlock_abi'])
  die_with_parent()  # after the change of user, which clears it


MODES = {'namespaces': isolate_by_namespaces, 'landlock': isolate_by_landlock}
