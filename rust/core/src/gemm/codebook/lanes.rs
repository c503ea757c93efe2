//! The operations of the integer kernels, on registers that hold several rows of 16 columns, one byte each.

/// The number of registers whose sums a kernel keeps at a time: those of 16 rows, or of half of them.
pub(super) const AT_ONCE: usize = 4;

/// A set of vector instructions.
///
/// # Safety
/// Every function needs the instruction set of its implementor. Pointers are valid for the bytes that the function
/// reads or writes and need no alignment; prefetches take any address.
pub(super) trait Lanes {
    /// The number of registers that hold a quad's rows, which is the number of passes over a row block.
    const HALVES: usize;
    /// The maximum number of tokens whose sums, for one byte of the centroids, fit the registers beside lookups and
    /// tables.
    const WIDEST: usize;
    /// The maximum number of tokens whose sums fit the registers of [`super::pieces`] during lookups, at most 5.
    const BESIDE: usize;
    /// The maximum number of tokens whose sums fit the registers of [`super::pieces`] after lookups, at most 6.
    const MOST: usize;
    /// A register of bytes or of their sums.
    type Int: Copy;
    /// 16 activations for every row of a register.
    type X: Copy;

    /// A register of zeros.
    unsafe fn zero() -> Self::Int;
    /// Loads a register of rows.
    unsafe fn load(from: *const u8) -> Self::Int;
    /// Loads the shuffle tables of a register's rows from their 2^`BITS` centroids each (3 or 4 bits), one byte each.
    unsafe fn tables<const BITS: u8>(centroids: *const u8) -> Self::Int;
    /// Stores a register of rows.
    unsafe fn store(bytes: Self::Int, to: *mut u8);
    /// The bits of each byte selected by `mask`; other bits are zero.
    unsafe fn mask(bytes: Self::Int, mask: u8) -> Self::Int;
    /// Shifts 16-bit words to the right: bits of the high byte enter the low one.
    unsafe fn shift(words: Self::Int, count: i32) -> Self::Int;
    /// The bits of `low` selected by `mask`, and of `high` elsewhere.
    unsafe fn blend(low: Self::Int, high: Self::Int, mask: u8) -> Self::Int;
    /// `table[index]` of each row, with indices below 16.
    unsafe fn look_up(table: Self::Int, index: Self::Int) -> Self::Int;
    /// Interleaves the bytes of two registers within each lane: those of its first eight columns, and those of its
    /// last eight.
    unsafe fn interleave(even: Self::Int, odd: Self::Int) -> [Self::Int; 2];
    /// Transposes words within lanes: lane l of register w of the result holds word w of lane l of the four registers.
    unsafe fn transposed(registers: [Self::Int; AT_ONCE]) -> [Self::Int; AT_ONCE];
    /// The centroids of a line of 2-bit codes, from those of 16 rows, four per row. Both are 64 bytes. Only for sets
    /// that look up 2-bit centroids ([`super::planes::by_tables`]).
    unsafe fn line(line: *const u8, centroids: *const u8) -> [Self::Int; AT_ONCE];
    /// Loads the unsigned activations of 16 columns, for every row.
    unsafe fn activations(from: *const u8) -> Self::X;
    /// Adds to `sums` the dot products of signed bytes with activations, over four columns each.
    unsafe fn dot(sums: Self::Int, weights: Self::Int, x: Self::X) -> Self::Int;
    /// Stores the sums of each row of four registers of consecutive rows, 16 / HALVES numbers.
    unsafe fn row_sums(sums: [Self::Int; AT_ONCE], to: *mut i32);
    /// Prefetches the cache line of an address, which may be invalid, into the first-level cache.
    unsafe fn prefetch(at: *const u8);
    /// Prefetches the cache line of an address, which may be invalid, into the second-level cache.
    unsafe fn prefetch_near(at: *const u8);
}
