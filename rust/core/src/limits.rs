//! The largest tensors that the formats hold; a reader refuses anything larger before it computes with it.

/// Most experts of a stacked tensor, and most rows of one expert.
pub const MAX_ROWS: u64 = (1 << 31) - 1;

/// Most columns: the length in bytes of a row of 2-bit weights must fit the 28 bits of its wide row tail.
pub const MAX_COLUMNS: u64 = 4 * ((1 << 28) - 1);
