//! The integer with the lowest cost for each value: the lower envelope of all costs.

use crate::simd::{Isa, vectorized};

/// The size of the border table of regular envelopes; a power of two, so that a mask makes any index valid.
const PLACES: usize = 1024;

/// The integers of lowest cost, between ascending borders.
///
/// Minus the square of the units u, the cost of integer q is the line `q^2 + price * bits(q) - 2 q u`; those of two
/// integers a and b cross at `(cost of b - cost of a) / (2 (b - a))`. A border is this value, computed in f64 and
/// rounded to f32.
///
/// Invariant: there is one more integer than borders.
#[derive(Debug)]
pub(super) struct Envelope {
    integers: Vec<i32>,
    borders: Vec<f32>,
    /// For regular envelopes, the borders in ascending order, then infinity. An envelope is regular if, for all
    /// integers q, the border of q and q + 1 is at q or between the two.
    between: Option<Box<[f32; PLACES]>>,
    largest: i32,
}

impl Envelope {
    /// The envelope of the lengths of the integers from -L to L.
    pub(super) fn new(bits: &[f32], price: f64) -> Envelope {
        let largest = bits.len() as i32 / 2;
        let (mut hull, mut borders) = (Vec::<(i32, f64)>::new(), Vec::<f64>::new());
        for (integer, &bits) in (-largest..).zip(bits) {
            let cost = f64::from(integer * integer) + price * f64::from(bits);
            while let Some(&(last, least)) = hull.last() {
                let border = (cost - least) / f64::from(2 * (integer - last));
                if borders.last().is_none_or(|&before| border > before) {
                    borders.push(border);
                    break;
                }
                hull.pop();
                borders.pop();
            }
            hull.push((integer, cost));
        }
        let borders: Vec<f32> = borders.into_iter().map(|border| border as f32).collect();
        let mut steps = borders.iter().zip(-largest..);
        let regular = hull.len() == bits.len() && hull.len() <= PLACES;
        let regular =
            regular && steps.all(|(border, below)| (below as f32..(below + 1) as f32).contains(border));
        Envelope {
            integers: hull.into_iter().map(|(integer, _)| integer).collect(),
            between: regular
                .then(|| Box::new(std::array::from_fn(|i| *borders.get(i).unwrap_or(&f32::INFINITY)))),
            borders,
            largest,
        }
    }

    /// The largest integer with a length.
    pub(super) fn largest(&self) -> i32 {
        self.largest
    }

    /// Finds the integers of lowest cost.
    pub(super) fn look_up(&self, isa: Isa, units: &[f32], found: &mut [i32]) {
        match &self.between {
            Some(borders) => step_up(isa, units, borders, self.largest, found),
            None => units
                .iter()
                .zip(found)
                .for_each(|(&unit, found)| *found = self.search(unit)),
        }
    }

    fn search(&self, unit: f32) -> i32 {
        self.integers[self.borders.partition_point(|&border| border < unit)]
    }

    /// The integer of lowest cost, by definition.
    #[cfg(test)]
    pub(super) fn naive(&self, unit: f32) -> i32 {
        self.integers[self.borders.iter().filter(|&&border| unit > border).count()]
    }
}

vectorized! {
    /// The integers of units by a regular envelope: the one below, or the next if the units are beyond their border.
    /// Units beyond the largest integer give the largest.
    fn step_up(units: &[f32], borders: &[f32; PLACES], largest: i32, found: &mut [i32]) = step_up_portable;
}

#[inline(always)]
fn step_up_portable(units: &[f32], borders: &[f32; PLACES], largest: i32, found: &mut [i32]) {
    let last = largest as f32;
    // Compilers vectorize the first loop only if it is separate from the lookup of the second.
    for (unit, place) in units.iter().zip(&mut *found) {
        let unit = if *unit > -last { *unit } else { -last };
        let unit = if unit < last { unit } else { last };
        *place = truncated(unit.floor() + last);
    }
    for (unit, found) in units.iter().zip(found) {
        let place = *found;
        *found = place - largest + i32::from(*unit > borders[place as usize % PLACES]);
    }
}

/// Converts an integral value from 0 to 2^22. Compilers do not vectorize a saturating conversion; after adding 1.5 *
/// 2^23, the integer is in the low bits.
#[inline(always)]
pub(super) fn truncated(value: f32) -> i32 {
    const INTEGRAL: f32 = (3 << 22) as f32;
    (value + INTEGRAL).to_bits() as i32 - INTEGRAL.to_bits() as i32
}
