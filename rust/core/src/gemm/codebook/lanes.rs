//! What the integer kernel asks of an instruction set: registers that hold some rows of 16 columns, a byte each.

/// Registers whose sums a kernel keeps at a time: those of a whole panel or of half of one.
pub(super) const AT_ONCE: usize = 4;

/// A set of vector instructions. Every function requires the set; pointers must be good for the bytes that are read or
/// written.
pub(super) trait Lanes {
    /// Registers that hold a quad's rows.
    const HALVES: usize;
    /// Most tokens whose sums, of one plane, fit the registers.
    const WIDEST: usize;
    /// Most tokens whose sums, of one plane, fit the registers beside centroids that are looked up once, at most 5.
    const BESIDE: usize;
    /// Most tokens whose sums fit the registers beside centroids that are looked up already, at most 6.
    const MOST: usize;
    /// A register of bytes or of their sums.
    type Int: Copy;
    /// 16 activations for every row of a register.
    type X: Copy;

    /// Zeros.
    unsafe fn zero() -> Self::Int;
    /// A register of rows.
    unsafe fn load(from: *const u8) -> Self::Int;
    /// The tables of a register's rows from their centroids, of `BITS` bits (3 or 4), a byte each.
    unsafe fn tables<const BITS: u8>(centroids: *const u8) -> Self::Int;
    /// Writes a register of rows.
    unsafe fn store(bytes: Self::Int, to: *mut u8);
    /// Bits of bytes.
    unsafe fn mask(bytes: Self::Int, mask: u8) -> Self::Int;
    /// 16-bit words to the right: bits of the neighbour enter the low byte.
    unsafe fn shift(words: Self::Int, count: i32) -> Self::Int;
    /// The bits of `low` where `mask` has ones, otherwise of `high`.
    unsafe fn blend(low: Self::Int, high: Self::Int, mask: u8) -> Self::Int;
    /// For each row `table[index]`, indices below 16.
    unsafe fn look_up(table: Self::Int, index: Self::Int) -> Self::Int;
    /// The bytes of both in turns, within each lane: of its first eight columns, and of its last.
    unsafe fn interleave(even: Self::Int, odd: Self::Int) -> [Self::Int; 2];
    /// Word w of each lane of each register, for each w: lane l holds word w of lane l of the four registers.
    unsafe fn transposed(registers: [Self::Int; AT_ONCE]) -> [Self::Int; AT_ONCE];
    /// The centroids of a line of 2-bit codes, from those of 16 rows, four a row. Both are 64 bytes. Only of sets that
    /// look such centroids up ([`super::planes`]).
    unsafe fn line(line: *const u8, centroids: *const u8) -> [Self::Int; AT_ONCE];
    /// Unsigned bytes of 16 columns.
    unsafe fn activations(from: *const u8) -> Self::X;
    /// Adds products of signed bytes and activations.
    unsafe fn dot(sums: Self::Int, weights: Self::Int, x: Self::X) -> Self::Int;
    /// The rows' sums of registers of neighbouring rows, 16 / HALVES numbers.
    unsafe fn row_sums(sums: [Self::Int; AT_ONCE], to: *mut i32);
    /// Asks for the cache line at an address, which need not be one.
    unsafe fn prefetch(at: *const u8);
    /// As [`Lanes::prefetch`], into the second-level cache.
    unsafe fn prefetch_near(at: *const u8);
}
