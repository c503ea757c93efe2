//! The state of past tokens that layers keep: growing buffers of keys and values, or recurrent states.

use half::bf16;

use super::require;
use super::sums::add_rows;
use crate::Result;
use crate::types::{Activations, from_bf16};

/// The values of a cache.
pub enum Lane<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
    /// For each row its codes, followed by the little-endian f32 by which they are multiplied.
    Bytes(&'a mut [i8]),
}

/// The number of bytes of a row's scale in [`Lane::Bytes`].
const SCALE: usize = 4;

/// A layer's cache.
pub struct Past<'a> {
    /// Keys, groups x capacity x width; for a delta rule, the last inputs of its convolution.
    pub keys: Lane<'a>,
    /// Values, likewise, possibly of another width; for a delta rule, its state.
    pub values: Lane<'a>,
    /// The first visible token; recurrent states ignore it.
    pub first: usize,
    /// The number of tokens in the cache.
    pub length: usize,
}

/// A token's rows before they are written.
pub(super) struct Own {
    values: Vec<f32>,
    /// The values in the precision of the lane.
    pub rounded: Vec<f32>,
}

/// The values of a lane.
#[derive(Clone, Copy)]
enum Values<'a> {
    Plain(Activations<'a>),
    Bytes(&'a [i8]),
}

/// A read-only lane.
#[derive(Clone, Copy)]
pub(super) struct Read<'a> {
    values: Values<'a>,
    capacity: usize,
    pub width: usize,
}

impl Own {
    /// Takes rows of width `width` for a lane.
    pub fn new(lane: &Lane, values: Vec<f32>, width: usize) -> Own {
        let rounded = lane.rounded(&values, width);
        Own { values, rounded }
    }
}

impl Lane<'_> {
    /// The values of a lane of floats.
    pub(super) fn floats(&self) -> Option<Activations<'_>> {
        match self {
            Lane::F32(values) => Some(Activations::F32(values)),
            Lane::Bf16(values) => Some(Activations::Bf16(values)),
            Lane::Bytes(_) => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            Lane::F32(values) => values.len(),
            Lane::Bf16(values) => values.len(),
            Lane::Bytes(values) => values.len(),
        }
    }

    /// The number of elements of a row of `width` values.
    fn stride(&self, width: usize) -> usize {
        match self {
            Lane::Bytes(_) => width + SCALE,
            _ => width,
        }
    }

    /// The values of rows of width `width` after writing and reading them.
    pub(super) fn rounded(&self, values: &[f32], width: usize) -> Vec<f32> {
        match self {
            Lane::F32(_) => values.to_vec(),
            Lane::Bf16(_) => values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
            Lane::Bytes(_) => {
                let rows = values.chunks_exact(width).flat_map(|row| {
                    let scale = scale(row);
                    row.iter().map(move |&x| f32::from(code(x, scale)) * scale)
                });
                rows.collect()
            }
        }
    }

    /// The lane as `groups` groups of heads of width `width`.
    pub(super) fn read(&self, groups: usize, width: usize) -> Read<'_> {
        let values = match self {
            Lane::F32(values) => Values::Plain(Activations::F32(values)),
            Lane::Bf16(values) => Values::Plain(Activations::Bf16(values)),
            Lane::Bytes(values) => Values::Bytes(values),
        };
        Read {
            values,
            capacity: self.len() / (groups * self.stride(width)).max(1),
            width,
        }
    }

    /// Writes a row starting at an offset.
    pub(super) fn put(&mut self, place: usize, from: &[f32]) {
        match self {
            Lane::F32(values) => values[place..][..from.len()].copy_from_slice(from),
            Lane::Bf16(values) => {
                let values = values[place..][..from.len()].iter_mut().zip(from);
                values.for_each(|(value, from)| *value = bf16::from_f32(*from).to_bits());
            }
            Lane::Bytes(values) => {
                let (codes, last) = values[place..][..from.len() + SCALE].split_at_mut(from.len());
                let scale = scale(from);
                codes
                    .iter_mut()
                    .zip(from)
                    .for_each(|(to, &x)| *to = code(x, scale));
                last.copy_from_slice(&scale.to_le_bytes().map(u8::cast_signed));
            }
        }
    }

    /// Writes the values of the token at `place` to each group.
    fn push(&mut self, groups: usize, place: usize, token: &[f32]) {
        let (width, size) = (token.len() / groups, self.len() / groups);
        let stride = self.stride(width);
        for (group, from) in token.chunks_exact(width).enumerate() {
            self.put(group * size + place * stride, from);
        }
    }

    fn reborrow(&mut self) -> Lane<'_> {
        match self {
            Lane::F32(values) => Lane::F32(values),
            Lane::Bf16(values) => Lane::Bf16(values),
            Lane::Bytes(values) => Lane::Bytes(values),
        }
    }
}

/// The scale of a row in 8 bits: its largest magnitude over 127, or NaN if a value is not finite.
fn scale(row: &[f32]) -> f32 {
    let largest = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    match row.iter().all(|x| x.is_finite()) {
        true => largest / 127.0,
        false => f32::NAN,
    }
}

/// The code of a value, in -127..=127; 0 if the scale is 0 or NaN. A subnormal scale may be much less than a 127th.
fn code(x: f32, scale: f32) -> i8 {
    match scale > 0.0 {
        true => (x / scale).round_ties_even().clamp(-127.0, 127.0) as i8,
        false => 0,
    }
}

impl Read<'_> {
    /// The offset of a group's row of a token.
    #[inline(always)]
    fn at(&self, group: usize, token: usize) -> usize {
        let stride = match self.values {
            Values::Plain(_) => self.width,
            Values::Bytes(_) => self.width + SCALE,
        };
        (group * self.capacity + token) * stride
    }

    /// Copies a group's row of a token in f32.
    #[inline(always)]
    pub fn widen(&self, group: usize, token: usize, out: &mut [f32]) {
        let at = self.at(group, token);
        match self.values {
            Values::Plain(values) => values.widen(at, out),
            Values::Bytes(values) => {
                let (codes, scale) = split(values, at, self.width);
                let codes = out.iter_mut().zip(codes);
                codes.for_each(|(out, &code)| *out = f32::from(code) * scale);
            }
        }
    }

    /// Adds a group's rows of tokens from `first` on to `sums`, one for each weight.
    #[inline(always)]
    pub fn add(&self, group: usize, first: usize, weights: &[f32], sums: &mut [f32]) {
        let at = |token| self.at(group, first + token);
        match self.values {
            Values::Plain(Activations::F32(values)) => {
                add_rows(sums, weights, |token| &values[at(token)..], |value| value);
            }
            Values::Plain(Activations::Bf16(values)) => {
                add_rows(sums, weights, |token| &values[at(token)..], from_bf16);
            }
            Values::Bytes(values) => {
                let scaled = weights.iter().enumerate();
                let scaled: Vec<f32> = scaled
                    .map(|(token, weight)| weight * split(values, at(token), self.width).1)
                    .collect();
                add_rows(sums, &scaled, |token| &values[at(token)..], f32::from);
            }
        }
    }
}

/// The codes and the scale of the row at an offset.
#[inline(always)]
fn split(values: &[i8], at: usize, width: usize) -> (&[i8], f32) {
    let (codes, last) = values[at..][..width + SCALE].split_at(width);
    let bytes: [i8; SCALE] = last.try_into().expect("the length is that of a scale");
    (codes, f32::from_le_bytes(bytes.map(i8::cast_unsigned)))
}

impl Past<'_> {
    /// Reborrows the cache.
    pub(super) fn reborrow(&mut self) -> Past<'_> {
        Past {
            keys: self.keys.reborrow(),
            values: self.values.reborrow(),
            ..*self
        }
    }

    /// Appends a token's keys and values to each group.
    pub(super) fn push(&mut self, groups: usize, keys: &Own, values: &Own) {
        self.keys.push(groups, self.length, &keys.values);
        self.values.push(groups, self.length, &values.values);
    }

    /// Checks that there is room for one more token, with the given number of groups and widths of keys and values.
    pub(super) fn check(&self, groups: usize, widths: [usize; 2]) -> Result<()> {
        let (first, length) = (self.first, self.length);
        for (lane, width) in [&self.keys, &self.values].into_iter().zip(widths) {
            let (len, size) = (lane.len(), groups * lane.stride(width));
            require(
                width > 0 && size > 0 && len % size == 0 && first <= length && length < len / size,
                || {
                    format!(
                        "a cache of {len} elements has no room for {groups} x {width} of token {length}, \
                         visible from {first} on"
                    )
                },
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 7;

    /// A row that was written to a lane in 8 bits, read again, and its codes and scale.
    fn written(row: &[f32]) -> (Vec<f32>, Vec<i8>) {
        let mut bytes = vec![99; 3 * (WIDTH + SCALE)];
        Lane::Bytes(&mut bytes).push(1, 1, row);
        let mut read = vec![0.0; WIDTH];
        Lane::Bytes(&mut bytes).read(1, WIDTH).widen(0, 1, &mut read);
        let (before, rest) = bytes.split_at(WIDTH + SCALE);
        let (own, after) = rest.split_at(WIDTH + SCALE);
        assert!(before.iter().chain(after).all(|&byte| byte == 99));
        (read, own.to_vec())
    }

    #[test]
    fn codes_of_subnormal_rows_stay_in_range() {
        let unit = f32::from_bits(1);
        let row = [-190.0, 190.0, 1.0, 0.0, -3.0, 60.0, -127.0].map(|x| x * unit);
        assert_eq!(written(&row).1[..WIDTH], [-127, 127, 1, 0, -3, 60, -127]);
    }

    #[test]
    fn a_row_in_8_bits_is_off_by_at_most_half_a_step() {
        for size in [1e-30f32, 0.3, 1.0, 5e4] {
            let row = [0.2, -1.0, 0.999, 0.0, 1e-4, -0.5, 0.004].map(|x: f32| x * size);
            let (read, codes) = written(&row);
            assert_eq!(codes[1], -127);
            for (found, expected) in read.iter().zip(row) {
                assert!(
                    (found - expected).abs() <= size / 253.9,
                    "{found} instead of {expected}"
                );
            }
            assert_eq!(Lane::Bytes(&mut []).rounded(&row, WIDTH), read);
        }
    }

    #[test]
    fn rows_without_a_scale() {
        assert_eq!(written(&[0.0; WIDTH]).0, [0.0; WIDTH]);
        let tiny = [f32::from_bits(1); WIDTH];
        assert_eq!(written(&tiny).0, [0.0; WIDTH]);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut row = [1.0; WIDTH];
            row[3] = bad;
            assert!(written(&row).0.iter().all(|x| x.is_nan()));
            let rounded = Lane::Bytes(&mut []).rounded(&row, WIDTH);
            assert!(rounded.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn weighted_rows_are_summed() {
        let rows: Vec<[f32; WIDTH]> = (0..5).map(|i| [i as f32 - 2.0; WIDTH]).collect();
        let mut bytes = vec![0; 5 * (WIDTH + SCALE)];
        for (place, row) in rows.iter().enumerate() {
            Lane::Bytes(&mut bytes).push(1, place, row);
        }
        let mut sums = [10.0; WIDTH];
        let lane = Lane::Bytes(&mut bytes);
        lane.read(1, WIDTH).add(0, 1, &[1.0, 2.0, -3.0], &mut sums);
        let expected = 10.0 - 1.0 - 3.0;
        assert!(sums.iter().all(|sum| (sum - expected).abs() < 1e-5), "{sums:?}");
    }
}
