//! Where the codes of the 16 rows of a row block lie in a step of columns.
//!
//! 3 and 4 bits: *quads* of 4 rows, in lanes of 16 bytes, and some groups of 16 columns. Byte b of a lane belongs to column
//! b of every group. 4 bits: two groups, the low and the high half of the byte. 3 bits: eight groups in three registers
//! A, B, C of 64 bytes; bits 0-2 and 3-5 of each are the codes of groups 0 to 5; the low two bits of group 6 are bits 6-7
//! of A and its high bit is bit 6 of C; the low two bits of group 7 are bits 6-7 of B and its high bit is bit 7 of C.
//!
//! 2 bits: *lines* of 16 rows and 16 columns, in two bit planes. Byte r of lane k belongs to row r; bit c of its low half
//! is the low bit of the code of column 4c + k, bit c of its high half the high bit. So for the kernels of AVX2 a half is
//! an index into a table of the sums of four activations; for those of AVX-512 a permutation of a line's bytes and a shift
//! give the indices of centroids.

/// The bytes of a lane, and the columns of a group.
pub const LANE: usize = 16;
/// The rows of a quad, whose codes of 3 or 4 bits share registers.
pub const QUAD: usize = 4;
/// The quads of a row block; with 2 bits the lines of a step.
pub const QUADS: usize = super::PANEL / QUAD;
/// The bytes of a register or a line.
pub const REGISTER: usize = LANE * QUAD;

/// The columns of a step.
pub const fn step_columns(bits: u8) -> usize {
    match bits {
        2 => 64,
        3 => 128,
        _ => 32,
    }
}

/// The registers of a quarter of a step: those of a quad, or one line.
pub const fn step_registers(bits: u8) -> usize {
    if bits == 3 { 3 } else { 1 }
}

/// Unpacks a row's codes, [`step_columns`], from the registers of a step.
#[inline(always)]
pub fn unpack(bits: u8, step: &[[u8; REGISTER]], row: usize, codes: &mut [u8]) {
    if bits == 2 {
        return unpack_lines(step, row, codes);
    }
    let quad = &step[row / QUAD * step_registers(bits)..];
    let lane = |register: usize| &quad[register].as_chunks::<LANE>().0[row % QUAD];
    let (a, groups) = (lane(0), codes.as_chunks_mut::<LANE>().0);
    if bits == 3 {
        let (b, c) = (lane(1), lane(2));
        for i in 0..LANE {
            (groups[0][i], groups[1][i]) = (a[i] & 7, a[i] >> 3 & 7);
            (groups[2][i], groups[3][i]) = (b[i] & 7, b[i] >> 3 & 7);
            (groups[4][i], groups[5][i]) = (c[i] & 7, c[i] >> 3 & 7);
            groups[6][i] = a[i] >> 6 | c[i] >> 4 & 4;
            groups[7][i] = b[i] >> 6 | c[i] >> 5 & 4;
        }
    } else {
        for i in 0..LANE {
            (groups[0][i], groups[1][i]) = (a[i] & 15, a[i] >> 4);
        }
    }
}

/// Unpacks a row's codes of 2 bits: four columns at a time, a byte each.
#[inline(always)]
fn unpack_lines(step: &[[u8; REGISTER]], row: usize, codes: &mut [u8]) {
    for (line, codes) in step.iter().zip(codes.as_chunks_mut::<LANE>().0) {
        let word = u32::from_le_bytes([0, 1, 2, 3].map(|k| line[k * LANE + row]));
        for (c, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *codes = (word >> c & 0x0101_0101 | word >> (c + 3) & 0x0202_0202).to_le_bytes();
        }
    }
}

/// Packs a row's codes of a step, the inverse of [`unpack`]; the row's bits of `step` must be zeros.
pub fn pack(bits: u8, codes: &[u8], row: usize, step: &mut [[u8; REGISTER]]) {
    if bits == 2 {
        for (line, codes) in step.iter_mut().zip(codes.as_chunks::<LANE>().0) {
            for (column, code) in codes.iter().enumerate() {
                let (c, k) = (column / 4, column % 4);
                line[k * LANE + row] |= (code & 1) << c | (code >> 1) << (4 + c);
            }
        }
        return;
    }
    let quad = &mut step[row / QUAD * step_registers(bits)..];
    for i in 0..LANE {
        let (at, code) = (row % QUAD * LANE + i, |group: usize| codes[group * LANE + i]);
        if bits == 3 {
            quad[0][at] = code(0) | code(1) << 3 | code(6) << 6;
            quad[1][at] = code(2) | code(3) << 3 | code(7) << 6;
            quad[2][at] = code(4) | code(5) << 3 | (code(6) >> 2) << 6 | (code(7) >> 2) << 7;
        } else {
            quad[0][at] = code(0) | code(1) << 4;
        }
    }
}
