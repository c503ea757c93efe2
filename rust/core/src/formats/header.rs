//! The start of a packed tensor, which most formats have in common: a magic number, a version, and fields of the format's own.

use crate::{Error, Result};

/// The header of a tensor, `N` bytes, after its magic number and version were checked; errors name the tensor as `what`.
///
/// # Errors
/// [`Error::InsufficientData`]: there is no whole header. [`Error::Corruption`]: it is another format's, or has another version.
pub(super) fn read<'a, const N: usize>(
    data: &'a [u8],
    what: &str,
    magic: [u8; 8],
    version: u16,
) -> Result<&'a [u8; N]> {
    let Some(header) = data.first_chunk::<N>() else {
        let message = format!("{what}: {} bytes hold no header", data.len());
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

/// A size in eight bytes of a header, at most `limit`; errors name the tensor as `what`.
///
/// # Errors
/// [`Error::Corruption`]: it is larger, or too large for this machine.
pub(super) fn dimension(header: &[u8], at: usize, limit: u64, what: &str) -> Result<usize> {
    let mut word = [0; 8];
    word.copy_from_slice(&header[at..at + 8]);
    let size = u64::from_le_bytes(word);
    if size > limit {
        return Err(Error::Corruption(format!(
            "{what}: the size {size} is beyond {limit}"
        )));
    }
    let too_large = |_| Error::Corruption(format!("{what}: too large for this machine"));
    usize::try_from(size).map_err(too_large)
}
