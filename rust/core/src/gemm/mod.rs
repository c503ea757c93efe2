//! Matrix products with packed weights: y = W x without unpacking W.
//!
//! Each format's module makes a [`layer::Projection`] from a view, a [`Mode`] and an instruction set. [`matmul`] and
//! [`matmul_grouped`] multiply by any projection; [`matmul_transposed`] multiplies by the transposed weights of any
//! tensor.

pub mod codebook;
pub mod coded;
pub mod compensated;
pub mod dense;
pub mod groupwise;
pub mod layer;
mod matmul;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod panel;
pub mod sparse;
pub mod ternary;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;
mod transposed;

pub use self::matmul::{matmul, matmul_grouped};
pub use self::transposed::matmul_transposed;

use crate::types::Mode;
use crate::{Error, Result};

/// Checks that a format has a mode; `format` names the format in the error message.
pub(crate) fn require_mode(mode: Mode, modes: &[Mode], format: &str) -> Result<()> {
    if modes.contains(&mode) {
        return Ok(());
    }
    let names: Vec<_> = modes.iter().map(|mode| mode.name()).collect();
    let (name, names) = (mode.name(), names.join(", "));
    Err(Error::InvalidArgument(format!(
        "{format} has no mode {name:?}: use one of {names}"
    )))
}
