//! The levels, the two non-zero values of every row. They are stored in the narrowest type that represents all of a
//! tensor's levels exactly; if the two levels of each row are opposite, only the positive ones are stored.

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

    /// The first type, in the order bf16, f16, f32, that represents every level exactly.
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

    fn write(self, level: f32, place: &mut [u8]) {
        match self {
            LevelType::Bf16 => place.copy_from_slice(&bf16::from_f32(level).to_le_bytes()),
            LevelType::F16 => place.copy_from_slice(&f16::from_f32(level).to_le_bytes()),
            LevelType::F32 => place.copy_from_slice(&level.to_le_bytes()),
        }
    }

    #[inline]
    fn read(self, levels: &[u8], i: usize) -> f32 {
        let at = i * self.bytes();
        let half = [levels[at], levels[at + 1]];
        match self {
            LevelType::Bf16 => bf16::from_le_bytes(half).to_f32(),
            LevelType::F16 => f16::from_le_bytes(half).to_f32(),
            LevelType::F32 => f32::from_le_bytes([half[0], half[1], levels[at + 2], levels[at + 3]]),
        }
    }
}

/// The stored form of a tensor's levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LevelStorage {
    pub level_type: LevelType,
    /// Whether only the positive level of a row is stored; the negative one is its opposite.
    pub symmetric: bool,
}

impl LevelStorage {
    /// The smallest storage that represents all levels exactly.
    pub fn smallest(levels: &[(f32, f32)]) -> LevelStorage {
        let zero = |pair: (f32, f32)| (pair.0.to_bits(), pair.1.to_bits()) == (0, 0);
        let opposite = |&pair: &(f32, f32)| (pair.1 > 0.0 && pair.0 == -pair.1) || zero(pair);
        LevelStorage {
            level_type: LevelType::narrowest(levels),
            symmetric: !levels.is_empty() && levels.iter().all(opposite),
        }
    }

    /// The size of a row's levels.
    pub fn bytes(self) -> usize {
        (2 - usize::from(self.symmetric)) * self.level_type.bytes()
    }

    /// Writes pairs of levels.
    pub fn write(self, levels: &[(f32, f32)], out: &mut [u8]) {
        let size = self.level_type.bytes();
        for (place, &(negative, positive)) in out.chunks_exact_mut(self.bytes()).zip(levels) {
            let (first, last) = place.split_at_mut(place.len() - size);
            if !self.symmetric {
                self.level_type.write(negative, first);
            }
            self.level_type.write(positive, last);
        }
    }

    /// Reads the `i`-th pair of levels: (negative, positive).
    #[inline]
    pub fn read(self, levels: &[u8], i: usize) -> (f32, f32) {
        if !self.symmetric {
            return (
                self.level_type.read(levels, 2 * i),
                self.level_type.read(levels, 2 * i + 1),
            );
        }
        let level = self.level_type.read(levels, i);
        (if level == 0.0 { 0.0 } else { -level }, level)
    }
}

/// Returns whether a pair of levels is valid: finite, negative <= 0 <= positive.
#[inline]
pub(super) fn valid((negative, positive): (f32, f32)) -> bool {
    negative.is_finite() && positive.is_finite() && negative <= 0.0 && positive >= 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(pairs: &[(f32, f32)]) -> Vec<(u32, u32)> {
        pairs.iter().map(|(a, b)| (a.to_bits(), b.to_bits())).collect()
    }

    #[test]
    fn storage_is_exact_and_opposite_levels_are_stored_once() {
        let cases: [(&[(f32, f32)], bool); 6] = [
            (&[(-1.0, 1.0), (-0.5, 0.5)], true),
            (&[(-1.0, 1.0), (0.0, 0.0)], true),
            (&[(-1.0, 1.0), (-0.0, 0.0)], false),
            (&[(-1.0, 1.0), (-1.0, 0.5)], false),
            (&[(-0.1, 0.1), (-1.0 / 3.0, 1.0 / 3.0)], true),
            (&[], false),
        ];
        for (levels, symmetric) in cases {
            let storage = LevelStorage::smallest(levels);
            assert_eq!(storage.symmetric, symmetric, "{levels:?}");
            let mut out = vec![0; levels.len() * storage.bytes()];
            storage.write(levels, &mut out);
            let read: Vec<_> = (0..levels.len()).map(|i| storage.read(&out, i)).collect();
            assert_eq!(bits(&read), bits(levels));
        }
    }
}
