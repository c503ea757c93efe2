//! The two non-zero values of every row, stored in the narrowest type that holds all of a tensor's exactly.

use half::{bf16, f16};

/// The type of the stored levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LevelType {
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl LevelType {
    const ALL: [LevelType; 3] = [LevelType::Bf16, LevelType::F16, LevelType::F32];

    /// The number that the header stores.
    pub fn id(self) -> u8 {
        self as u8
    }

    /// Inverts [`LevelType::id`].
    pub fn from_id(id: u8) -> Option<LevelType> {
        LevelType::ALL.get(usize::from(id)).copied()
    }

    /// The name: `bfloat16`, `float16` or `float32`.
    pub fn name(self) -> &'static str {
        match self {
            LevelType::Bf16 => "bfloat16",
            LevelType::F16 => "float16",
            LevelType::F32 => "float32",
        }
    }

    /// The size of one level in bytes.
    pub fn bytes(self) -> usize {
        match self {
            LevelType::Bf16 | LevelType::F16 => 2,
            LevelType::F32 => 4,
        }
    }

    /// The first type, in the order bf16, f16, f32, that holds every level exactly.
    pub fn narrowest(levels: &[(f32, f32)]) -> LevelType {
        let all = |exact: fn(f32) -> bool| levels.iter().all(|&(low, high)| exact(low) && exact(high));
        if all(|x| bf16::from_f32(x).to_f32().to_bits() == x.to_bits()) {
            LevelType::Bf16
        } else if all(|x| f16::from_f32(x).to_f32().to_bits() == x.to_bits()) {
            LevelType::F16
        } else {
            LevelType::F32
        }
    }

    /// Writes pairs of levels.
    pub(super) fn write(self, levels: &[(f32, f32)], out: &mut [u8]) {
        for (place, &(negative, positive)) in out.chunks_exact_mut(2 * self.bytes()).zip(levels) {
            for (place, level) in place.chunks_exact_mut(self.bytes()).zip([negative, positive]) {
                match self {
                    LevelType::Bf16 => place.copy_from_slice(&bf16::from_f32(level).to_le_bytes()),
                    LevelType::F16 => place.copy_from_slice(&f16::from_f32(level).to_le_bytes()),
                    LevelType::F32 => place.copy_from_slice(&level.to_le_bytes()),
                }
            }
        }
    }

    /// Reads the `i`-th pair of levels: (negative, positive).
    #[inline]
    pub(super) fn read(self, levels: &[u8], i: usize) -> (f32, f32) {
        let pair = &levels[i * 2 * self.bytes()..][..2 * self.bytes()];
        let half = |at: usize| [pair[at], pair[at + 1]];
        let full = |at: usize| [pair[at], pair[at + 1], pair[at + 2], pair[at + 3]];
        match self {
            LevelType::Bf16 => (
                bf16::from_le_bytes(half(0)).to_f32(),
                bf16::from_le_bytes(half(2)).to_f32(),
            ),
            LevelType::F16 => (
                f16::from_le_bytes(half(0)).to_f32(),
                f16::from_le_bytes(half(2)).to_f32(),
            ),
            LevelType::F32 => (f32::from_le_bytes(full(0)), f32::from_le_bytes(full(4))),
        }
    }
}

/// Whether a pair of levels is what a ternary row may have: finite, negative <= 0 <= positive.
#[inline]
pub(super) fn valid((negative, positive): (f32, f32)) -> bool {
    negative.is_finite() && positive.is_finite() && negative <= 0.0 && positive >= 0.0
}
