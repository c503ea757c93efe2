//! Positional reads of a file, past the page cache if asked to: one implementation per system.

use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a file for reading. Direct reads bypass the page cache; the file system must support them.
#[cfg(target_os = "linux")]
pub(super) fn open(file: &Path, direct: bool) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};

    let direct = match direct {
        true => OFlags::DIRECT,
        false => OFlags::empty(),
    };
    let descriptor = rustix::fs::open(file, OFlags::RDONLY | OFlags::CLOEXEC | direct, Mode::empty())?;
    Ok(descriptor.into())
}

/// See the implementation for Linux.
#[cfg(target_vendor = "apple")]
pub(super) fn open(file: &Path, direct: bool) -> io::Result<File> {
    let file = File::open(file)?;
    if direct {
        rustix::fs::fcntl_nocache(&file, true)?;
    }
    Ok(file)
}

/// See the implementation for Linux.
#[cfg(windows)]
pub(super) fn open(file: &Path, direct: bool) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;

    const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;
    let flags = if direct { FILE_FLAG_NO_BUFFERING } else { 0 };
    File::options().read(true).custom_flags(flags).open(file)
}

/// See the implementation for Linux. Reads are never direct here.
#[cfg(not(any(target_os = "linux", target_vendor = "apple", windows)))]
pub(super) fn open(file: &Path, _direct: bool) -> io::Result<File> {
    File::open(file)
}

/// Reads bytes from offset `place`; returns their number, which is 0 at the end of the file.
#[cfg(unix)]
pub(super) fn read_at(file: &File, into: &mut [u8], place: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, into, place)
}

/// See the implementation for Unix.
#[cfg(windows)]
pub(super) fn read_at(file: &File, into: &mut [u8], place: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, into, place)
}
