//! Fits tables to a tensor: decides which streams share a table, and the frequencies of each.

use rayon::prelude::*;

use super::histogram::{Histogram, INTEGERS};
use super::layout::MAX_TABLES;
use super::table::{SLOTS, Table};
use super::{LANES, trellis};

/// The approximate cost of an exception in bits, besides its placeholder symbol.
const EXCEPTION_BITS: f64 = 32.0;
/// Integers that occur less often get no slots; each of these shares is tried, and the cheapest is used.
const RAREST: [f64; 5] = [
    1.0 / 12000.0,
    1.0 / 6000.0,
    1.0 / 3000.0,
    1.0 / 1500.0,
    1.0 / 750.0,
];
/// Rounds of assigning each stream its best table and refitting tables to their streams.
const ROUNDS: usize = 3;
/// The share of the bits that doubling the number of tables must save.
const WORTHWHILE: f64 = 0.0005;

/// The lowest integer of a table and its frequencies, in stored form.
#[derive(Debug, Clone)]
pub(super) struct Frequencies {
    pub lowest: i8,
    pub counts: Vec<u8>,
}

impl Frequencies {
    /// Builds the decoding table.
    pub fn table(&self) -> Option<Table> {
        Table::new(self.lowest, &self.counts)
    }

    /// The stored size in bytes.
    pub fn bytes(&self) -> usize {
        1 + self.counts.len()
    }

    /// The cost of each integer in bits.
    pub fn costs(&self) -> [f32; INTEGERS] {
        let bits = |frequency: u8| (SLOTS as f64 / f64::from(frequency)).log2();
        let most = self.counts.iter().copied().max().unwrap_or(1);
        let mut costs = [(bits(most) + EXCEPTION_BITS) as f32; INTEGERS];
        let first = (i32::from(self.lowest) + 128) as usize;
        for (cost, &frequency) in costs[first..].iter_mut().zip(&self.counts) {
            if frequency > 0 {
                *cost = bits(frequency) as f32;
            }
        }
        costs
    }
}

/// The index of the cheapest table, and the cost of a stream by it in bits.
pub(super) fn cheapest(histogram: &Histogram, costs: &[[f32; INTEGERS]]) -> (usize, f64) {
    let costs = costs.iter().map(|costs| cost(histogram, costs));
    let better = |best: (usize, f64), next: (usize, f64)| if next.1 < best.1 { next } else { best };
    costs.enumerate().fold((0, f64::INFINITY), better)
}

fn cost(histogram: &Histogram, costs: &[f32; INTEGERS]) -> f64 {
    let mut sums = [0f32; 8];
    for (counts, costs) in histogram.counts.chunks_exact(8).zip(costs.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += counts[i] as f32 * costs[i];
        }
    }
    sums.iter().map(|&sum| f64::from(sum)).sum()
}

/// The bits per weight of all integers by one table.
pub(super) fn bits_by_one_table(sample: &[Histogram]) -> f64 {
    let counts = Histogram::sum(sample.iter());
    let others: f64 = sample.iter().map(|histogram| f64::from(histogram.others)).sum();
    let costs = fitted(&counts, false).costs();
    let rarest = costs.iter().copied().fold(EXCEPTION_BITS as f32, f32::max);
    let pairs = counts.iter().zip(costs).chain(std::iter::once((&others, rarest)));
    let bits: f64 = pairs.map(|(count, cost)| count * f64::from(cost)).sum();
    bits / (counts.iter().sum::<f64>() + others).max(1.0)
}

/// Fits tables to sampled streams of plain or dependent codes, each of which represents `weight` streams. Tables are
/// added while they save more than their size.
pub(super) fn tables(sample: &[Histogram], weight: f64, dependent: bool) -> Vec<Frequencies> {
    let mut best = vec![fitted(&Histogram::sum(sample.iter()), dependent)];
    let costs = best[0].costs();
    let length = |histogram: &Histogram| cost(histogram, &costs);
    let mut order: Vec<(f64, usize)> = sample.iter().map(length).zip(0..).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut least = order.iter().map(|(bits, _)| bits * weight).sum::<f64>();
    let mut groups = 2;
    while groups <= MAX_TABLES && groups <= sample.len() {
        let (found, bits) = clustered(sample, &order, groups, dependent);
        let stored: usize = found.iter().map(|table| 8 * table.bytes()).sum();
        let bits = bits * weight + stored as f64;
        if bits > least * (1.0 - WORTHWHILE) {
            break;
        }
        (best, least) = (found, bits);
        groups *= 2;
    }
    best
}

/// Fits tables to `count` groups of streams, which start as neighbours in the given order; returns the bits of all
/// streams.
fn clustered(
    sample: &[Histogram],
    order: &[(f64, usize)],
    groups: usize,
    dependent: bool,
) -> (Vec<Frequencies>, f64) {
    let mut group_of = vec![0; sample.len()];
    for (place, &(_, stream)) in order.iter().enumerate() {
        group_of[stream] = place * groups / order.len();
    }
    let (mut tables, mut bits) = (Vec::new(), 0.0);
    for _ in 0..ROUNDS {
        let members = |group: usize| {
            let of_group = sample.iter().zip(&group_of).filter(move |(_, of)| **of == group);
            of_group.map(|(histogram, _)| histogram)
        };
        let found = (0..groups).into_par_iter().map(|group| {
            let any = members(group).next().is_some();
            any.then(|| fitted(&Histogram::sum(members(group)), dependent))
        });
        tables = found
            .collect::<Vec<_>>()
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        let costs: Vec<_> = tables.iter().map(Frequencies::costs).collect();
        let chosen: Vec<_> = sample.par_iter().map(|stream| cheapest(stream, &costs)).collect();
        group_of = chosen.iter().map(|&(group, _)| group).collect();
        bits = chosen.iter().map(|&(_, bits)| bits).sum();
    }
    (tables, bits)
}

/// The cheapest frequencies for counts of integers, or of indices of dependent codes.
fn fitted(counts: &[f64; INTEGERS], dependent: bool) -> Frequencies {
    let first = match dependent {
        true => (i32::from(trellis::LOWEST) + 128) as usize,
        false => heaviest(counts, LANES),
    };
    let window = &counts[first..first + LANES];
    let total = counts.iter().sum::<f64>().max(1.0);
    let tries = RAREST.map(|share| {
        let frequencies = shared_out(window, total * share, dependent);
        let found = Frequencies {
            lowest: (first as i32 - 128) as i8,
            counts: frequencies,
        };
        let pairs = counts.iter().zip(found.costs());
        (
            pairs.map(|(count, cost)| count * f64::from(cost)).sum::<f64>(),
            found,
        )
    });
    let best = tries.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
    match best {
        Some((_, found)) => trimmed(found, if dependent { 2 } else { 1 }),
        None => unreachable!("at least one candidate was tried"),
    }
}

/// The start of the `width` consecutive integers with the largest total count, as close to the middle as possible.
fn heaviest(counts: &[f64; INTEGERS], width: usize) -> usize {
    let starts = (0..=INTEGERS - width).map(|start| {
        let middle = INTEGERS / 2;
        let off = (start + width / 2).abs_diff(middle);
        (counts[start..start + width].iter().sum::<f64>(), off, start)
    });
    let best = starts.min_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    best.map_or(0, |(_, _, start)| start)
}

/// Distributes 256 slots by counts: at least one for each integer with a larger share than `rarest`, then one at a
/// time to the integer for which it saves most. At least two integers get slots; for dependent codes, one even and
/// one odd.
fn shared_out(counts: &[f64], rarest: f64, dependent: bool) -> Vec<u8> {
    let total = counts.iter().sum::<f64>().max(1.0);
    let mut slots: Vec<u8> = counts
        .iter()
        .map(|&count| match count > rarest {
            true => (count / total * SLOTS as f64).round().clamp(1.0, 255.0) as u8,
            false => 0,
        })
        .collect();
    for parity in 0..if dependent { 2 } else { 0 } {
        let places = || (parity..counts.len()).step_by(2);
        let most = places()
            .max_by(|&a, &b| counts[a].total_cmp(&counts[b]))
            .unwrap_or(parity);
        if places().all(|place| slots[place] == 0) {
            slots[most] = 1;
        }
    }
    let middle = counts.len() / 2;
    let first = slots.iter().position(|&slots| slots > 0).unwrap_or(middle);
    if slots.iter().filter(|&&slots| slots > 0).count() < 2 {
        slots[first] = slots[first].max(1);
        slots[if first > 0 { first - 1 } else { 1 }] = 1;
    }
    let gain = |count: f64, slots: u8, more: f64| count * ((f64::from(slots) + more) / f64::from(slots)).ln();
    loop {
        let sum: usize = slots.iter().map(|&slots| usize::from(slots)).sum();
        let candidates = counts.iter().zip(&slots).enumerate();
        let best = match sum.cmp(&SLOTS) {
            std::cmp::Ordering::Equal => return slots,
            std::cmp::Ordering::Less => candidates
                .filter(|(_, (_, slots))| (1..255).contains(*slots))
                .map(|(i, (&count, &slots))| (gain(count, slots, 1.0), i))
                .max_by(|a, b| a.0.total_cmp(&b.0)),
            std::cmp::Ordering::Greater => candidates
                .filter(|(_, (_, slots))| **slots > 1)
                .map(|(i, (&count, &slots))| (gain(count, slots, -1.0), i))
                .max_by(|a, b| a.0.total_cmp(&b.0)),
        };
        let Some((_, i)) = best else { return slots };
        slots[i] = if sum < SLOTS { slots[i] + 1 } else { slots[i] - 1 };
    }
}

/// Removes integers without slots from both ends of a table; at its start, `step` at a time.
fn trimmed(found: Frequencies, step: usize) -> Frequencies {
    let Frequencies { lowest, counts } = found;
    let first = counts.iter().position(|&slots| slots > 0).unwrap_or(0) / step * step;
    let last = counts.iter().rposition(|&slots| slots > 0).unwrap_or(0);
    Frequencies {
        lowest: lowest.wrapping_add(first as i8),
        counts: counts[first..=last].to_vec(),
    }
}
