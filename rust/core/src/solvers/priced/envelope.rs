//! Which integer is the cheapest where: the lower envelope of all costs.

use crate::simd::{Isa, vectorized};

/// Cells of a step: so few borders lie in a cell that a search from its start ends at once.
const CELLS: usize = 32;

/// The cheapest integers, between ascending borders.
///
/// Less the square of the units u, the cost of integer q is the line `q^2 + price * bits(q) - 2 q u`; those of two
/// integers a and b cross at `(cost of b - cost of a) / (2 (b - a))`. A border is that, computed in f64 and rounded to f32.
///
/// Invariants: there is one more integer than borders; `cells` are `2 * CELLS * largest + 1`, the last one begins at the
/// largest integer.
#[derive(Debug)]
pub(super) struct Envelope {
    integers: Vec<i32>,
    borders: Vec<f32>,
    cells: Vec<Cell>,
    largest: i32,
}

/// What is the cheapest in a cell of the units: `below` up to the border, then `above`.
#[derive(Debug, Clone, Copy)]
struct Cell {
    border: f32,
    /// [`MANY`] if there are several borders.
    below: i16,
    above: i16,
}

/// What no integer with a length is.
const MANY: i16 = i16::MIN;

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
        let mut envelope = Envelope {
            integers: hull.into_iter().map(|(integer, _)| integer).collect(),
            borders: borders.into_iter().map(|border| border as f32).collect(),
            cells: Vec::new(),
            largest,
        };
        envelope.cells = envelope.cut();
        envelope
    }

    /// All cells.
    fn cut(&self) -> Vec<Cell> {
        let (last, mut place) = (self.largest * CELLS as i32, 0);
        let cells = (-last..=last).map(|number| {
            let start = place;
            while place < self.borders.len() && self.borders[place] < (number + 1) as f32 / CELLS as f32 {
                place += 1;
            }
            Cell {
                border: self.borders.get(start).copied().unwrap_or(f32::INFINITY),
                below: if place - start > 1 {
                    MANY
                } else {
                    self.integers[start] as i16
                },
                above: self.integers[(start + 1).min(self.borders.len())] as i16,
            }
        });
        cells.collect()
    }

    /// The largest integer with a length.
    pub(super) fn largest(&self) -> i32 {
        self.largest
    }

    /// Finds the cheapest integers.
    pub(super) fn look_up(&self, isa: Isa, units: &[f32], found: &mut [i32]) {
        cells(isa, units, self.largest, found);
        for (&unit, found) in units.iter().zip(found) {
            let cell = self.cells[*found as usize];
            *found = match cell.below {
                MANY => self.search(unit),
                _ if unit > cell.border => cell.above.into(),
                below => below.into(),
            };
        }
    }

    fn search(&self, unit: f32) -> i32 {
        self.integers[self.borders.partition_point(|&border| border < unit)]
    }

    /// The cheapest integer by its definition.
    #[cfg(test)]
    pub(super) fn naive(&self, unit: f32) -> i32 {
        self.integers[self.borders.iter().filter(|&&border| unit > border).count()]
    }
}

vectorized! {
    /// The cells of units; those beyond the largest integer have the last one.
    fn cells(units: &[f32], largest: i32, found: &mut [i32]) = cells_portable;
}

#[inline(always)]
fn cells_portable(units: &[f32], largest: i32, found: &mut [i32]) {
    let last = (largest * CELLS as i32) as f32;
    for (unit, found) in units.iter().zip(found) {
        let cell = unit * CELLS as f32;
        let cell = if cell > -last { cell } else { -last };
        let cell = if cell < last { cell } else { last };
        // Compilers make no vector code of a conversion that saturates; added to 1.5 * 2^23, an integer below 2^22 in
        // magnitude is the low bits.
        *found = ((cell.floor() + last) + INTEGRAL).to_bits() as i32 - INTEGRAL.to_bits() as i32;
    }
}

/// One is its last bit.
const INTEGRAL: f32 = (3 << 22) as f32;
