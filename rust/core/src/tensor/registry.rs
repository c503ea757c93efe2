//! The formats known to this process.

use std::sync::RwLock;

use super::{Format, MAGIC_BYTES, Tensor};
use super::{channels, codebook, coded, compensated, groupwise, ternary};
use crate::types::Shape;
use crate::{Error, Result};

/// The formats of this crate.
static FORMATS: [&dyn Format; 6] = [
    &ternary::Ternary,
    &groupwise::Groupwise,
    &codebook::Codebook,
    &compensated::Compensated,
    &coded::CodedIntegers,
    &channels::Channels,
];

/// Formats registered from outside of this crate.
static REGISTERED: RwLock<Vec<&dyn Format>> = RwLock::new(Vec::new());

/// All formats: this crate's, then registered ones in order of registration.
pub fn formats() -> Vec<&'static dyn Format> {
    let registered = REGISTERED.read().unwrap_or_else(|error| error.into_inner());
    FORMATS.iter().chain(registered.iter()).copied().collect()
}

/// Adds a format for the rest of the process: [`open`] and [`format`] find it from now on.
///
/// # Errors
/// [`Error::InvalidArgument`] if another format has its magic or kind.
pub fn register(format: &'static dyn Format) -> Result<()> {
    let mut registered = REGISTERED.write().unwrap_or_else(|error| error.into_inner());
    let mut known = FORMATS.iter().chain(registered.iter());
    if known.any(|known| known.magic() == format.magic() || known.kind() == format.kind()) {
        let (kind, magic) = (format.kind(), format.magic().escape_ascii().to_string());
        return invalid(format!(
            "a format {kind:?} or one with the magic {magic} is already registered"
        ));
    }
    registered.push(format);
    Ok(())
}

/// The format of a kind.
///
/// # Errors
/// [`Error::InvalidArgument`] if there is none.
pub fn format(kind: &str) -> Result<&'static dyn Format> {
    let found = formats().into_iter().find(|format| format.kind() == kind);
    found.map_or_else(|| invalid(format!("unknown kind of packed tensor {kind:?}")), Ok)
}

/// The maximum number of matrices and rows of a tensor without weights. They take no bytes, so any number could be
/// claimed.
const MOST_EMPTY: usize = 1 << 16;

/// Opens a packed tensor by its magic.
///
/// # Errors
/// [`Error::InsufficientData`] if the bytes are too short for a magic, [`Error::UnknownFormat`] if no format has it,
/// [`Error::Corruption`] if there are more than 65,536 rows without columns or matrices without rows. Otherwise as
/// [`Format::open`].
pub fn open(data: &[u8]) -> Result<Box<dyn Tensor>> {
    let tensor = find(data)?.open(data)?;
    let shape = tensor.shape();
    let rows = shape.experts.checked_mul(shape.rows.max(1));
    if shape.weights() == Some(0) && rows.is_none_or(|rows| rows > MOST_EMPTY) {
        let Shape { experts, rows, .. } = shape;
        let message =
            format!("{experts} matrices of {rows} rows without weights: at most {MOST_EMPTY} are read");
        return Err(Error::Corruption(message));
    }
    Ok(tensor)
}

/// The format of a packed tensor by its magic.
fn find(data: &[u8]) -> Result<&'static dyn Format> {
    let Some(magic) = data.first_chunk::<MAGIC_BYTES>() else {
        let message = format!("{} bytes are too few for a packed tensor", data.len());
        return Err(Error::InsufficientData(message));
    };
    let formats = formats();
    match formats.iter().find(|format| format.magic() == *magic) {
        Some(format) => Ok(*format),
        None => {
            let known: Vec<_> = formats
                .iter()
                .map(|f| f.magic().escape_ascii().to_string())
                .collect();
            let (magic, known) = (magic.escape_ascii(), known.join(", "));
            Err(Error::UnknownFormat(format!(
                "{magic} (known: {known}); a newer moepack may read it"
            )))
        }
    }
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
