//! The affine map from decoded bytes to codes.

/// Maps bytes to codes: a code is `factor` times the byte plus `offset`.
#[derive(Debug, Clone, Copy)]
pub struct Affine {
    /// 1, or 2 for dependent codes.
    pub factor: i32,
    /// The code of byte zero.
    pub offset: i32,
    /// The exclusive upper bound of all bytes, at most 128.
    pub most: usize,
}
