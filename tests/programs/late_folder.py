"""A folder as another host sees it over NFS: what others change in it is seen some seconds late.

    late_folder.py BACKING MOUNT SECONDS

mounts at MOUNT what lies in the folder BACKING. The kernel believes for so many seconds what it was last told of each
name there: that it exists, that it does not, and its size and times. Two mounts of one folder are two hosts.
"""
import os
import sys

import mfusepy


class Passed(mfusepy.Operations):
    """Each call, as it is, to the folder behind."""

    use_ns = True

    def __init__(self, backing):
        self.backing = backing

    def _of(self, path):
        return self.backing + path

    def getattr(self, path, fh=None):
        found = os.lstat(self._of(path))
        return {key: getattr(found, key) for key in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")} | {
            key: getattr(found, f"{key}_ns") for key in ("st_atime", "st_mtime", "st_ctime")}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._of(path))]

    def create(self, path, mode, fi=None):
        return os.open(self._of(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path, flags):
        return os.open(self._of(path), flags & ~(os.O_APPEND | os.O_DIRECT))

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._of(path), length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def fsyncdir(self, path, datasync, fh):
        pass

    def flush(self, path, fh):
        pass

    def release(self, path, fh):
        os.close(fh)

    def mkdir(self, path, mode):
        os.mkdir(self._of(path), mode)

    def rmdir(self, path):
        os.rmdir(self._of(path))

    def unlink(self, path):
        os.unlink(self._of(path))

    def rename(self, old, new, flags=0):
        if flags & 1 and os.path.lexists(self._of(new)):         # RENAME_NOREPLACE
            raise FileExistsError(17, "exists")
        os.rename(self._of(old), self._of(new))

    def link(self, target, source):
        os.link(self._of(source), self._of(target))

    def symlink(self, target, source):
        os.symlink(source, self._of(target))

    def readlink(self, path):
        return os.readlink(self._of(path))

    def chmod(self, path, mode):
        os.chmod(self._of(path), mode)

    def utimens(self, path, times=None):
        os.utime(self._of(path), ns=times)

    def statfs(self, path):
        found = os.statvfs(self._of(path))
        return {key: getattr(found, key) for key in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail",
                                                     "f_files", "f_ffree", "f_namemax")}


if __name__ == "__main__":
    seconds = sys.argv[3]
    mfusepy.FUSE(Passed(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True, attr_timeout=seconds,
                 entry_timeout=seconds, negative_timeout=seconds)
