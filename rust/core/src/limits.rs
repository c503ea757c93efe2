//! The size limits of the formats; readers reject larger tensors before any arithmetic with their sizes.

/// The maximum number of experts of a stacked tensor, and of rows of one expert.
pub const MAX_ROWS: u64 = (1 << 31) - 1;

/// The maximum number of columns: the length in bytes of a row of 2-bit weights must fit the 28 bits of its wide row
/// tail.
pub const MAX_COLUMNS: u64 = 4 * ((1 << 28) - 1);
