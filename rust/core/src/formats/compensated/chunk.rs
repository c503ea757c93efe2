//! Chunks of 64 values of a factor: eight *planes* of eight consecutive values, so that eight bytes widen to eight
//! lanes.
//!
//! | bits | bytes | content |
//! |---|---|---|
//! | 3 | 24 | bytes A, B, C of each of eight lanes: plane 0 in A bits 0-2, 1 in A 3-5, 2 and 3 in B, 4 and 5 in C; the low two bits of plane 6 in A 6-7 and of plane 7 in B 6-7, their high bits in C 6 and C 7 |
//! | 8 | 64 | one byte per value |
//! | 16 | 128 | one f16 per value |
//!
//! Value `8 p + l` is lane l of plane p. Integer codes are unsigned; the value is `scale * (code - 2^(bits - 1))`.

/// The values of a chunk.
pub const CHUNK: usize = 64;
/// The values of a plane.
pub const LANES: usize = 8;

/// The values of a chunk: codes minus [`Width::middle`], or f16 values.
pub type Values = [f32; CHUNK];

/// The width of a factor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Width {
    /// Three-bit codes.
    Three,
    /// Eight-bit codes.
    Eight,
    /// f16 values without scales.
    Half,
}

impl Width {
    /// All widths.
    pub const ALL: [Width; 3] = [Width::Three, Width::Eight, Width::Half];

    /// The bits per value.
    pub fn bits(self) -> u8 {
        match self {
            Width::Three => 3,
            Width::Eight => 8,
            Width::Half => 16,
        }
    }

    /// The width with `bits` bits.
    pub fn from_bits(bits: u8) -> Option<Width> {
        Width::ALL.into_iter().find(|width| width.bits() == bits)
    }

    /// The bytes of a chunk.
    pub fn chunk_bytes(self) -> usize {
        usize::from(self.bits()) * CHUNK / 8
    }

    /// The code of zero.
    pub fn middle(self) -> u8 {
        match self {
            Width::Three => 4,
            Width::Eight => 128,
            Width::Half => 0,
        }
    }

    /// Writes a chunk of codes below 2^bits. [`Width::Half`] uses [`pack_halves`] instead.
    pub fn pack(self, codes: &[u8; CHUNK], out: &mut [u8]) {
        if self == Width::Eight {
            return out.copy_from_slice(codes);
        }
        for lane in 0..LANES {
            let code = |plane: usize| codes[plane * LANES + lane];
            let (six, seven) = (code(6), code(7));
            out[lane] = code(0) | code(1) << 3 | six << 6;
            out[LANES + lane] = code(2) | code(3) << 3 | seven << 6;
            out[2 * LANES + lane] = code(4) | code(5) << 3 | six >> 2 << 6 | seven >> 2 << 7;
        }
    }

    /// Reads a chunk: codes minus [`Width::middle`], or f16 values.
    #[inline(always)]
    pub fn unpack(self, bytes: &[u8]) -> Values {
        match self {
            Width::Three => unpack_three(bytes),
            Width::Eight => {
                let mut values = [0.0; CHUNK];
                let bytes = &bytes[..CHUNK];
                for i in 0..CHUNK {
                    values[i] = f32::from(i16::from(bytes[i]) - 128);
                }
                values
            }
            Width::Half => {
                let mut values = [0.0; CHUNK];
                for (value, half) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = half_value(u16::from_le_bytes(*half));
                }
                values
            }
        }
    }
}

#[inline(always)]
fn unpack_three(bytes: &[u8]) -> Values {
    let (lanes, _) = bytes.as_chunks::<LANES>();
    let (a, b, c) = (lanes[0], lanes[1], lanes[2]);
    let mut values = [0.0; CHUNK];
    for lane in 0..LANES {
        let (a, b, c) = (i32::from(a[lane]), i32::from(b[lane]), i32::from(c[lane]));
        let codes = [
            a & 7,
            a >> 3 & 7,
            b & 7,
            b >> 3 & 7,
            c & 7,
            c >> 3 & 7,
            a >> 6 | (c >> 4 & 4),
            b >> 6 | (c >> 5 & 4),
        ];
        for (plane, code) in codes.into_iter().enumerate() {
            values[plane * LANES + lane] = (code - 4) as f32;
        }
    }
    values
}

/// Converts an f16 without branches, so that loops vectorize: finite values exactly, others to large finite numbers.
#[inline(always)]
pub(super) fn half_value(bits: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Writes f16 values.
pub fn pack_halves(values: &[half::f16; CHUNK], out: &mut [u8]) {
    for (bytes, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *bytes = value.to_le_bytes();
    }
}
