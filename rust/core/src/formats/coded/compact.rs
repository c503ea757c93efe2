//! Compacts the bytes that an encoder emits: those of some lanes of a register.

use super::LANES;
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// Packs the bytes of marked lanes (255; others are 0) at the end of `room`, in order; returns their number. Bytes
/// before them are unspecified.
pub(super) type Compact = fn(bytes: &[u8; LANES], marks: &[u8; LANES], room: &mut [u8; LANES]) -> usize;

/// The fastest implementation for an instruction set.
pub(super) fn fastest(isa: Isa) -> Compact {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 | Kind::Avx512 | Kind::Amx => |bytes, marks, room| {
            // SAFETY: `isa` proves that the processor has AVX2 and POPCNT, which all three sets include.
            unsafe { x86::compact(bytes, marks, room) }
        },
        _ => portable,
    }
}

fn portable(bytes: &[u8; LANES], marks: &[u8; LANES], room: &mut [u8; LANES]) -> usize {
    let mut left = LANES;
    for (&byte, &mark) in bytes.iter().zip(marks).rev() {
        room[(left - 1) % LANES] = byte;
        left -= usize::from(mark & 1);
    }
    LANES - left
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::LANES;

    /// The number of lanes packed at a time.
    const GROUP: usize = 8;

    /// For each mask of eight bytes, the source of each byte when marked bytes are packed at the end.
    static SOURCES: [[u8; GROUP]; 256] = {
        let mut sources = [[0x80; GROUP]; 256];
        let mut mask = 0;
        while mask < 256 {
            let (mut lane, mut place) = (GROUP, GROUP);
            while lane > 0 {
                lane -= 1;
                if mask >> lane & 1 == 1 {
                    place -= 1;
                    sources[mask][place] = lane as u8;
                }
            }
            mask += 1;
        }
        sources
    };

    /// See [`super::Compact`].
    ///
    /// # Safety
    /// The processor has AVX2 and POPCNT.
    #[target_feature(enable = "avx2,popcnt")]
    pub(super) unsafe fn compact(bytes: &[u8; LANES], marks: &[u8; LANES], room: &mut [u8; LANES]) -> usize {
        let mut left = LANES;
        for group in (0..LANES / GROUP).rev() {
            // SAFETY: eight bytes of a register are read. Eight bytes that end at `left` are written. Each later
            // group has lowered `left` by at most eight, so it is at least `8 * (group + 1)`.
            unsafe {
                let marks = _mm_loadl_epi64(marks.as_ptr().add(GROUP * group).cast());
                let mask = _mm_movemask_epi8(marks) as usize & 255;
                let sources = _mm_loadl_epi64(SOURCES[mask].as_ptr().cast());
                let bytes = _mm_loadl_epi64(bytes.as_ptr().add(GROUP * group).cast());
                let packed = _mm_shuffle_epi8(bytes, sources);
                _mm_storel_epi64(room.as_mut_ptr().add(left - GROUP).cast(), packed);
                left -= mask.count_ones() as usize;
            }
        }
        LANES - left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::coded::tests::Random;

    #[test]
    fn every_set_packs_alike() {
        let mut random = Random(2);
        for share in 0..=8 {
            let bytes: [u8; LANES] = std::array::from_fn(|_| random.next() as u8);
            let marks: [u8; LANES] =
                std::array::from_fn(|_| if random.next() % 8 < share { u8::MAX } else { 0 });
            let wanted = bytes.iter().zip(&marks).filter(|(_, mark)| **mark > 0);
            let wanted: Vec<u8> = wanted.map(|(byte, _)| *byte).collect();
            for isa in Isa::all_available() {
                let mut room = [0; LANES];
                let count = fastest(isa)(&bytes, &marks, &mut room);
                assert_eq!(room[LANES - count..], wanted, "{}", isa.name());
            }
        }
    }
}
