//! The kind of grids.

/// The type that scales and offsets are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// IEEE half precision.
    F16,
    /// The upper half of a float32.
    Bf16,
}

/// The kind of grids, and the effort of the search.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Bits per code, 1 to 8.
    pub bits: u32,
    /// The number of columns that share parameters, at least 1; if it is at least the columns of a row, a row is one
    /// group.
    pub group_size: usize,
    /// Whether `offset = -2^(bits - 1) * scale`, with scales of either sign, instead of a free offset.
    pub symmetric: bool,
    /// The storage type of scales and offsets.
    pub storage: Storage,
    /// The maximum number of regressions of a group.
    pub iterations: usize,
}

impl Grid {
    /// The number of groups of a row.
    pub fn groups(&self, columns: usize) -> usize {
        columns.div_ceil(self.group_size.max(1))
    }
}
