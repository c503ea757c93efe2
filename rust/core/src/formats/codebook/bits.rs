//! The placement of the codes of a row block's 16 rows in a step of columns.
//!
//! With 3 and 4 bits, codes form *quads* of 4 rows, in lanes of 16 bytes and several groups of 16 columns. Byte b of
//! a lane belongs to column b of every group. With 4 bits there are two groups, in the low and the high half of the
//! byte. With 3 bits there are eight groups in three registers A, B, C of 64 bytes: bits 0-2 and 3-5 of each are the
//! codes of groups 0 to 5; the low two bits of group 6 are bits 6-7 of A and its high bit is bit 6 of C; the low two
//! bits of group 7 are bits 6-7 of B and its high bit is bit 7 of C.
//!
//! With 2 bits, codes form *lines* of 16 rows and 16 columns, in two bit planes. Byte r of lane k belongs to row r;
//! bit c of its low half is the low bit of the code of column 4c + k, and bit c of its high half is the high bit.
//! AVX2 kernels use a half as an index into a table of the sums of four activations; AVX-512 kernels get centroid
//! indices by a permutation of the line's bytes and a shift.

/// The bytes of a lane, and the columns of a group.
pub const LANE: usize = 16;
/// The rows of a quad, whose codes of 3 or 4 bits share registers.
pub const QUAD: usize = 4;
/// The quads of a row block, or, with 2 bits, the lines of a step.
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

/// Unpacks a row's codes, [`step_columns`] of them, from the registers of a step.
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

/// Unpacks a row's 2-bit codes, four columns at a time, one byte each.
#[inline(always)]
fn unpack_lines(step: &[[u8; REGISTER]], row: usize, codes: &mut [u8]) {
    for (line, codes) in step.iter().zip(codes.as_chunks_mut::<LANE>().0) {
        let word = u32::from_le_bytes([0, 1, 2, 3].map(|k| line[k * LANE + row]));
        for (c, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *codes = (word >> c & 0x0101_0101 | word >> (c + 3) & 0x0202_0202).to_le_bytes();
        }
    }
}

/// Packs a row's codes of a step, the inverse of [`unpack`]; the row's bits in `step` must be zero.
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
