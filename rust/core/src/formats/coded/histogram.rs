//! Counts of the integers of streams.

/// The number of integers of a signed byte.
pub(super) const INTEGERS: usize = 256;

/// Counts of the integers from -128 to 127.
#[derive(Debug, Clone)]
pub(super) struct Histogram {
    pub counts: Box<[u32; INTEGERS]>,
    /// The count of all other integers, which become exceptions.
    pub others: u32,
}

impl Histogram {
    /// Counts the integers of codes.
    pub fn new<T: Copy>(
        runs: impl Iterator<Item = impl AsRef<[T]>>,
        integer: impl Fn(T) -> i32,
    ) -> Histogram {
        // Neighbours have separate counters: incrementing the same counter twice in a row waits for the store.
        let mut counts = [[0u32; INTEGERS + 1]; 4];
        let mut add = |codes: &[T]| {
            for (counts, &code) in counts.iter_mut().zip(codes) {
                counts[(integer(code).wrapping_add(128) as u32 as usize).min(INTEGERS)] += 1;
            }
        };
        for run in runs {
            let (fours, rest) = run.as_ref().as_chunks::<4>();
            fours.iter().for_each(|four| add(four));
            add(rest);
        }
        let [first, second, third, fourth] = counts;
        let sum = |i: usize| first[i] + second[i] + third[i] + fourth[i];
        Histogram {
            counts: Box::new(std::array::from_fn(sum)),
            others: sum(INTEGERS),
        }
    }

    /// The counts of each integer, summed over streams.
    pub fn sum<'a>(all: impl Iterator<Item = &'a Histogram>) -> [f64; INTEGERS] {
        let mut sums = [0.0; INTEGERS];
        for histogram in all {
            let pairs = sums.iter_mut().zip(histogram.counts.iter());
            pairs.for_each(|(sum, &count)| *sum += f64::from(count));
        }
        sums
    }
}
