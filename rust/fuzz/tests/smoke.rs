//! Every target on the seeds, the golden files and blind mutations of them, which finds obvious faults at once;
//! libFuzzer searches deeper. `MOEPACK_MUTATIONS` sets the number of mutations; the same number gives the same ones.

use std::fs;
use std::path::{Path, PathBuf};

use moepack_fuzz as fuzz;

/// Mutations per target unless the environment sets another number.
const MUTATIONS: usize = 5000;

/// Bytes of a seed: larger ones only cost time.
const MAX_SEED: usize = 1 << 14;

macro_rules! targets {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            smoke(fuzz::$name::run);
        })*
    };
}

targets!(
    coded_integers,
    device_read,
    kernel_twins,
    tensor_changed,
    tensor_open,
    tensor_read,
    ternary_round_trip
);

fn smoke(run: fn(&[u8])) {
    let count =
        std::env::var("MOEPACK_MUTATIONS").map_or(MUTATIONS, |count| count.parse().expect("a number"));
    let (seeds, mut chance) = (seeds(), Chance(1));
    assert!(seeds.len() > 50);
    seeds.iter().for_each(|seed| run(seed));
    for _ in 0..count {
        run(&mutated(seeds[chance.below(seeds.len())].clone(), &mut chance));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = files(&home.join("seeds"));
    files.extend(files_of_tensors(&home.join("../../tests/golden")));
    files.sort();
    let read = |file: PathBuf| fs::read(file).expect("seeds are read");
    let fits = |seed: &Vec<u8>| (1..MAX_SEED).contains(&seed.len());
    files.into_iter().map(read).filter(fits).collect()
}

fn files_of_tensors(directory: &Path) -> Vec<PathBuf> {
    let is_tensor = |file: &PathBuf| {
        file.extension()
            .is_some_and(|extension| extension == "bin" || extension == "coded")
    };
    files(directory).into_iter().filter(is_tensor).collect()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("directories of seeds are read");
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries
        .flat_map(|entry| below(entry.expect("entries are read").path()))
        .collect()
}

/// A few bytes, bits or words of the header or of any part changed; sometimes the end is cut off.
fn mutated(mut data: Vec<u8>, chance: &mut Chance) -> Vec<u8> {
    for _ in 0..[1, 1, 2, 4, 16][chance.below(5)] {
        let reach = [data.len(), data.len().min(128)][chance.below(2)];
        let place = chance.below(reach);
        match chance.below(3) {
            0 => data[place] ^= 1 << chance.below(8),
            1 => data[place] = [0, 1, 0x7F, 0x80, 0xFF, chance.below(256) as u8][chance.below(6)],
            _ => {
                let word = [0, 1, (1 << 31) - 1, 1 << 40, 1 << 63, u64::MAX][chance.below(6)];
                let word = word.to_le_bytes();
                data[place / 8 * 8..]
                    .iter_mut()
                    .zip(word)
                    .for_each(|(byte, new)| *byte = new);
            }
        }
    }
    if chance.below(20) == 0 {
        data.truncate(chance.below(data.len()));
    }
    data
}

/// Pseudo-random numbers (a linear congruential generator of 64 bits, its high half).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}
