//! Codes of a quad in a step: 4 rows, in lanes of 16 bytes, and some groups of 16 columns.
//!
//! Byte b of a lane speaks of column b of every group. 4 bits: two groups, the low and the high half of the byte. 2 bits:
//! four groups, low bits first. 3 bits: eight groups in three registers A, B, C of 64 bytes; bits 0-2 and 3-5 of each are
//! the codes of groups 0 to 5; the low two bits of group 6 are bits 6-7 of A and its high bit is bit 6 of C; the low two
//! bits of group 7 are bits 6-7 of B and its high bit is bit 7 of C.

/// Bytes of a lane, and columns of a group.
pub const LANE: usize = 16;
/// Rows whose codes a register holds.
pub const QUAD: usize = 4;
/// Quads of a panel.
pub const QUADS: usize = super::PANEL / QUAD;
/// Bytes of a register.
pub const REGISTER: usize = LANE * QUAD;

/// Columns of a step.
pub const fn step_columns(bits: u8) -> usize {
    match bits {
        2 => 64,
        3 => 128,
        _ => 32,
    }
}

/// Registers of four rows of a step.
pub const fn step_registers(bits: u8) -> usize {
    if bits == 3 { 3 } else { 1 }
}

/// Unpacks a lane of each register of a step into its row's codes.
///
/// `at(r)` are the 16 bytes of register r that belong to the row; `codes` are [`step_columns`].
#[inline(always)]
pub fn unpack<'a>(bits: u8, at: impl Fn(usize) -> &'a [u8; LANE], codes: &mut [u8]) {
    let (a, groups) = (at(0), codes.as_chunks_mut::<LANE>().0);
    match bits {
        3 => {
            let (b, c) = (at(1), at(2));
            for i in 0..LANE {
                (groups[0][i], groups[1][i]) = (a[i] & 7, a[i] >> 3 & 7);
                (groups[2][i], groups[3][i]) = (b[i] & 7, b[i] >> 3 & 7);
                (groups[4][i], groups[5][i]) = (c[i] & 7, c[i] >> 3 & 7);
                groups[6][i] = a[i] >> 6 | c[i] >> 4 & 4;
                groups[7][i] = b[i] >> 6 | c[i] >> 5 & 4;
            }
        }
        _ => {
            let mask = (1 << bits) - 1;
            for (g, group) in groups.iter_mut().enumerate() {
                for i in 0..LANE {
                    group[i] = a[i] >> (bits as usize * g) & mask;
                }
            }
        }
    }
}

/// Packs a row's codes of a step, the inverse of [`unpack`]; gives the bytes of each register.
pub fn pack(bits: u8, codes: &[u8]) -> [[u8; LANE]; 3] {
    let (groups, mut out) = (codes.as_chunks::<LANE>().0, [[0; LANE]; 3]);
    for i in 0..LANE {
        if bits == 3 {
            let (six, seven) = (groups[6][i], groups[7][i]);
            out[0][i] = groups[0][i] | groups[1][i] << 3 | six << 6;
            out[1][i] = groups[2][i] | groups[3][i] << 3 | seven << 6;
            out[2][i] = groups[4][i] | groups[5][i] << 3 | (six >> 2) << 6 | (seven >> 2) << 7;
        } else {
            let add = |byte, (g, group): (usize, &[u8; LANE])| byte | group[i] << (bits as usize * g);
            out[0][i] = groups.iter().enumerate().fold(0, add);
        }
    }
    out
}
