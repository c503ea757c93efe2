//! The header fields that most formats share: a magic number and a version, followed by fields of each format.

use crate::{Error, Result};

/// Reads an `N`-byte header and checks its magic number and version; errors name the tensor as `what`.
///
/// # Errors
/// [`Error::InsufficientData`] if the header is incomplete, [`Error::Corruption`] if the magic number or the version
/// differs.
pub(super) fn read<'a, const N: usize>(
    data: &'a [u8],
    what: &str,
    magic: [u8; 8],
    version: u16,
) -> Result<&'a [u8; N]> {
    let Some(header) = data.first_chunk::<N>() else {
        let message = format!("{what}: {} bytes are too few for a header", data.len());
        return Err(Error::InsufficientData(message));
    };
    if header[..8] != magic {
        return Err(Error::Corruption(format!("{what}: wrong magic")));
    }
    let found = u16::from_le_bytes([header[8], header[9]]);
    match found == version {
        true => Ok(header),
        false => Err(Error::Corruption(format!(
            "{what}: version {found}; this library reads {version}"
        ))),
    }
}

/// Reads an eight-byte size from a header; it must be at most `limit`. Errors name the tensor as `what`.
///
/// # Errors
/// [`Error::Corruption`] if the size exceeds `limit` or does not fit a `usize`.
pub(super) fn dimension(header: &[u8], at: usize, limit: u64, what: &str) -> Result<usize> {
    let mut word = [0; 8];
    word.copy_from_slice(&header[at..at + 8]);
    let size = u64::from_le_bytes(word);
    if size > limit {
        return Err(Error::Corruption(format!("{what}: size {size} exceeds {limit}")));
    }
    let too_large = |_| Error::Corruption(format!("{what}: too large for this machine"));
    usize::try_from(size).map_err(too_large)
}
